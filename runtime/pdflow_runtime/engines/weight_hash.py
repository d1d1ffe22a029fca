"""A hash over all tensor data of a Hugging Face folder: the same for the same tensors, whatever files they are in.

It covers each tensor's name, dtype, shape and bytes, in the order of names. A tensor is hashed in pieces of
PIECE_BYTES, by several threads (SHA-256 releases the interpreter's lock), each of which reads through a buffer of
READ_BYTES, so that memory does not grow with the model.

Hashing 140 GB takes seconds to minutes, so what was found for a file is kept, by the file's device, inode, size and
times. A lock for each file lets one process of a host hash it while others that start with it wait for the result.
Neither is needed: where the cache cannot be read, written or locked, a line in the log says so, and the file is hashed.

Source of the file format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from pdflow_runtime.clock import stopwatch_ns, wall_ns
from pdflow_runtime.engines.config import ModelError
from pdflow_runtime.engines.weight_files import weight_files

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 20
"""Part of the definition of the hash: another size gives other hashes."""
READ_BYTES: Final = 4 << 20
MOST_THREADS: Final = 16
"""More would be faster than what any disk gives: one hashes 0.5 to 2 GB/s (benchmarks/hash_speed.py)."""
SETTLED_NS: Final = 100_000_000
"""A file that was written so shortly before may be written again without a change of its times, which file systems
count in steps of up to 10 ms: what is found then is not kept."""
LARGE_BYTES: Final = 1_000_000_000
"""A file larger than this is logged before it is hashed, as the start then takes seconds longer."""
HEAD_BYTES: Final = 8
MOST_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""
METADATA: Final = "__metadata__"


class Tensor(msgspec.Struct, frozen=True):
    """The entry of a tensor in a file's header: its dtype by safetensors' names (F32, BF16, ...), and where its bytes
    are behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class HashedTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    digest: str


class Stamp(msgspec.Struct, frozen=True):
    """The attributes by which a file is known to be unchanged. The time of the last write can be set back, by `cp -p`
    or `touch`; that of the last change of its attributes cannot."""

    device: int
    inode: int
    nbytes: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class HashedFile(msgspec.Struct, frozen=True):
    """The cache entry of one file. `piece_bytes` is that of the version of pdflow that wrote it."""

    stamp: Stamp
    piece_bytes: int
    tensors: dict[str, HashedTensor]


@attrs.frozen
class WeightHash:
    """The hash of a folder's weights. `hashed_bytes` were read for it now, in `elapsed_s`; the rest was known."""

    digest: bytes
    tensors: int
    nbytes: int
    hashed_bytes: int
    elapsed_s: float
    dtypes: tuple[str, ...]
    """As they are stored, without repetition."""


TORCH_DTYPES: Final = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""By safetensors' names."""
_header: Final = msgspec.json.Decoder(dict[str, Any])
_hashed_file: Final = msgspec.json.Decoder(HashedFile)


def stored_dtype(folder: Path) -> str | None:
    """Return torch's name of the one dtype of all tensors; None if they have several, or one that is not computed in.
    ModelError if a file cannot be read."""
    found = set()
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            header, _ = _read_header(path, file.fileno(), os.fstat(file.fileno()).st_size)
        found |= {tensor.dtype for tensor in header.values()}
    return TORCH_DTYPES.get(found.pop()) if len(found) == 1 else None


def hash_weights(folder: Path, cache: Path) -> WeightHash:
    """Return the hash of the folder's weights. Where two files have a tensor of the same name, the later
    file's counts, as in `read_weights`. ModelError if one cannot be read."""
    begun_ns = stopwatch_ns()
    tensors: dict[str, HashedTensor] = {}
    nbytes = hashed_bytes = 0
    for path in weight_files(folder):
        try:
            found, hashed = _known_or_hashed(path, cache)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from None
        tensors |= found.tensors
        nbytes += found.stamp.nbytes
        hashed_bytes += found.stamp.nbytes if hashed else 0
    listed = [(name, each.dtype, each.shape, each.digest) for name, each in sorted(tensors.items())]
    return WeightHash(
        sha256(msgspec.json.encode(listed)).digest(),
        len(tensors),
        nbytes,
        hashed_bytes,
        (stopwatch_ns() - begun_ns) / 1e9,
        tuple(sorted({each.dtype for each in tensors.values()})),
    )


def _known_or_hashed(path: Path, cache: Path) -> tuple[HashedFile, bool]:
    """Return the hashes of a file, and whether it was hashed now."""
    stamp = Stamp.of(path.stat())
    kept = cache / f"{stamp.device:x}-{stamp.inode:x}.json"
    found = _kept(kept, stamp)
    if found is not None:
        return found, False
    with _locked(kept.with_suffix(".lock"), path):
        # Another process may have hashed it while this one waited.
        found = _kept(kept, stamp)
        if found is not None:
            return found, False
        begun_ns = wall_ns()
        found = HashedFile(stamp, PIECE_BYTES, _hashed_tensors(path, stamp))
        if begun_ns - max(stamp.written_ns, stamp.changed_ns) > SETTLED_NS:
            _keep(kept, found)
        return found, True


# The cache.


def _kept(kept: Path, stamp: Stamp) -> HashedFile | None:
    """Return the cache entry of a file, if it has one and is unchanged."""
    try:
        found = _hashed_file.decode(kept.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("cannot read the cached hash %s: %s; hashing the weights again", kept, error)
        return None
    return found if (found.stamp, found.piece_bytes) == (stamp, PIECE_BYTES) else None


def _keep(kept: Path, found: HashedFile) -> None:
    """Write the cache entry. Readers find the entry before or this one, never half of one."""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{kept.name}-", dir=kept.parent)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(found))
            os.replace(temporary, kept)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        log.warning("cannot cache the hashes of the weights, so every start computes them: %s", error)


@contextmanager
def _locked(lock: Path, path: Path) -> Iterator[None]:
    """Hold the lock of this file among the processes of this host that hash it; go on without it where it cannot be
    had. The lock ends with its process, so a killed one holds no other up."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        log.warning(
            "cannot lock the hash cache of %s: %s; several processes may hash the file at the same time", path, error
        )
        yield
        return
    with file:
        try:
            _lock(file.fileno(), path)
        except OSError as error:
            log.warning(
                "cannot lock the hash cache of %s: %s; several processes may hash the file at the same time",
                path,
                error,
            )
        yield


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process, which is hashing %s", path)
        fcntl.flock(fd, fcntl.LOCK_EX)


# One file.


def _hashed_tensors(path: Path, stamp: Stamp) -> dict[str, HashedTensor]:
    if stamp.nbytes > LARGE_BYTES:
        log.info("hashing the weights in %s (%.1f GB), once on this host", path, stamp.nbytes / 1e9)
    with path.open("rb", buffering=0) as file:
        header, data_at = _read_header(path, file.fileno(), stamp.nbytes)
        spans = {name: _pieces(*(data_at + at for at in tensor.data_offsets)) for name, tensor in header.items()}
        ordered = [(file.fileno(), *span) for pieces in spans.values() for span in pieces]
        with ThreadPoolExecutor(threads(len(ordered))) as pool:
            digests = pool.map(lambda piece: _hashed_piece(path, *piece), ordered)
            tensors = {
                name: HashedTensor(
                    header[name].dtype,
                    header[name].shape,
                    sha256(b"".join(next(digests) for _ in pieces)).hexdigest(),
                )
                for name, pieces in spans.items()
            }
        if Stamp.of(os.fstat(file.fileno())) != stamp:
            raise ModelError(f"{path}: changed while it was read; start again when the file is complete")
    return tensors


def threads(pieces: int) -> int:
    """Return how many threads hash so many pieces on this machine."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), pieces))


def _read_header(path: Path, fd: int, nbytes: int) -> tuple[dict[str, Tensor], int]:
    """Return the file's tensors, and where their bytes begin. ModelError."""
    length = int.from_bytes(os.pread(fd, HEAD_BYTES, 0), "little")
    if not 2 <= length <= min(MOST_HEADER_BYTES, nbytes - HEAD_BYTES):
        raise ModelError(f"{path}: not a safetensors file")
    try:
        decoded = _header.decode(os.pread(fd, length, HEAD_BYTES))
        header = {name: msgspec.convert(each, Tensor) for name, each in decoded.items() if name != METADATA}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not a safetensors file: its header is invalid: {error}") from None
    data_at = HEAD_BYTES + length
    for name, tensor in header.items():
        first, end = tensor.data_offsets
        if not 0 <= first <= end <= nbytes - data_at:
            raise ModelError(f"{path}: {name} lies beyond the end of the file")
    return header, data_at


def _pieces(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + PIECE_BYTES, end)) for at in range(start, end, PIECE_BYTES)]


def _hashed_piece(path: Path, fd: int, at: int, end: int) -> bytes:
    hashed, buffer = sha256(), memoryview(bytearray(min(READ_BYTES, end - at)))
    while at < end:
        count = os.preadv(fd, [buffer[: end - at]], at)
        if not count:
            raise ModelError(f"{path}: truncated: the file ends before its last tensor")
        hashed.update(buffer[:count])
        at += count
    return hashed.digest()
