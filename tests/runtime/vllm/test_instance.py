"""What of vLLM's configuration is served, and each refusal: one sentence that says what, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from pdflow.errors import EXIT_BAD_INPUT
from pdflow.layout.shapes import KvShape, MlaDims
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import S
from pdflow_runtime.vllm.instance import Instance, KvGroup, instance_of
from pdflow_runtime.vllm.options import Options, UnsupportedError, read_options

FRESH = "32c82529-8417-4bb8-9b12-3e8fdef0ab8a"
"""As `uuid.uuid4` draws it for vLLM."""


class FullAttentionSpec(SimpleNamespace):
    """vLLM's, by its name: Llama's KV in float32, blocks of 128 tokens."""


class MLAAttentionSpec(SimpleNamespace):
    """A latent of 576 values a token, in bfloat16."""


class SlidingWindowSpec(SimpleNamespace):
    """As of full attention, with a window."""


class MambaSpec(SimpleNamespace):
    pass


ATTENTION = {
    "block_size": 128,
    "num_kv_heads": 2,
    "head_size": 64,
    "head_size_v": 64,
    "dtype": SimpleNamespace(itemsize=4),
}


def full(**changed: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**ATTENTION | changed)


def sliding(window: int = 1024, **changed: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**ATTENTION | {"sliding_window": window} | changed)


def latent(**changed: Any) -> MLAAttentionSpec:
    values = {"block_size": 64, "head_size": 576, "dtype": SimpleNamespace(itemsize=2)}
    return MLAAttentionSpec(**values | changed)


def group(spec: object, layers: int = 4) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{number}" for number in range(layers)])


@attrs.define(kw_only=True)
class Given:
    """How vLLM was started."""

    kv_role: str = "kv_producer"
    engine_id: str = FRESH
    extra: dict[str, Any] | None = None
    parallel: dict[str, int] = attrs.field(factory=dict)
    speculative: object = None
    groups: tuple[SimpleNamespace, ...] = attrs.field(factory=lambda: (group(full()),))
    heads: int = 2
    model: dict[str, Any] = attrs.field(factory=dict)

    def instance(self) -> Instance:
        parallel = {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
        }
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_role=self.kv_role, engine_id=self.engine_id, kv_connector_extra_config=self.extra
            ),
            parallel_config=SimpleNamespace(**parallel | self.parallel),
            speculative_config=self.speculative,
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: self.heads, **self.model),
        )
        return instance_of(config, SimpleNamespace(num_blocks=1000, kv_cache_groups=list(self.groups)))


def refusal(**given: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        Given(**given).instance()
    assert caught.value.exit_code == EXIT_BAD_INPUT
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


# Served.


def test_the_defaults() -> None:
    instance = Given().instance()
    assert instance.role == "prefill"
    assert instance.info == EngineInfo(FRESH, Shards(1, 1, 128))
    assert instance.shape == KvShape(4, 2, 64, 4, 128, packed=True)
    assert (instance.num_blocks, instance.dp_rank) == (1000, 0)
    assert instance.options == Options()
    assert not instance.protocol.pulls
    timers = Timers()
    assert instance.protocol.timers == timers
    options = instance.options
    assert (options.transfer_mode, options.transport, options.method) == ("push", "nixl", "nixl-push")
    assert (options.host, options.port) == ("127.0.0.1", 0)
    assert (options.progressive, options.allow_static_engine_id) == (False, False)
    assert (options.weights_version, options.events) == (None, None)
    assert options.lease_s == timers.lease_ns / S
    assert options.dead_s == timers.dead_ns / S
    assert options.deadline_s == timers.deadline_ns / S


def test_a_consumer_decodes() -> None:
    assert Given(kv_role="kv_consumer").instance().role == "decode"


def test_pull_and_timers_come_from_the_options() -> None:
    instance = Given(extra={"transfer_mode": "pull", "lease_s": 60, "dead_s": 2.5, "deadline_s": 100}).instance()
    assert instance.protocol.pulls
    assert instance.options.method == "nixl-pull"
    assert instance.protocol.timers == Timers(lease_ns=60 * S, dead_ns=int(2.5 * S), deadline_ns=100 * S)


def test_tensor_parallel_ranks_are_shards() -> None:
    assert Given(parallel={"tensor_parallel_size": 4}, heads=8).instance().info.shards == Shards(4, 1, 128)


@pytest.mark.parametrize("rank", [0, 1, 11])
def test_a_data_parallel_rank_is_an_engine_of_its_own(rank: int) -> None:
    """vLLM appends the rank to the id of the instance, and runs an EngineCore for it."""
    instance = Given(engine_id=f"{FRESH}_dp{rank}", parallel={"data_parallel_index": rank}).instance()
    assert instance.info.engine == f"{FRESH}_dp{rank}"
    assert instance.dp_rank == rank


def test_mla_has_one_latent_a_token() -> None:
    instance = Given(groups=(group(latent(), 27),), heads=1).instance()
    assert instance.shape == KvShape(27, 1, 576, 2, 64, mla=MlaDims(576, 0))
    assert instance.info.shards.block_size == 64


def test_several_groups_share_one_shape() -> None:
    """Layers are counted over all groups. With a window, the last token's KV is not exchanged."""
    one, other = group(full(), 3), SimpleNamespace(kv_cache_spec=sliding(), layer_names=["x.0", "x.1"])
    instance = Given(groups=(one, other)).instance()
    assert instance.shape == KvShape(5, 2, 64, 4, 128, packed=True)
    assert instance.groups == (KvGroup(("layers.0", "layers.1", "layers.2")), KvGroup(("x.0", "x.1"), 1024))
    assert [instance.exchanged(tokens) for tokens in (1, 2, 128)] == [1, 1, 127]


def test_a_model_may_have_sliding_windows_alone() -> None:
    instance = Given(groups=(group(sliding(4096)),)).instance()
    assert [each.window for each in instance.groups] == [4096]
    assert instance.exchanged(100) == 99


def test_without_windows_all_tokens_are_exchanged() -> None:
    assert Given().instance().exchanged(100) == 100


# Refused.


def test_one_instance_for_both_roles() -> None:
    assert refusal(kv_role="kv_both") == (
        "kv_role kv_both is not supported: give prefill instances kv_producer and decode instances kv_consumer"
    )


def test_pipeline_parallelism() -> None:
    text = refusal(parallel={"pipeline_parallel_size": 2})
    assert text == "pipeline parallelism is not supported: set --pipeline-parallel-size 1"


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_context_parallelism(name: str) -> None:
    assert refusal(parallel={name: 2}) == f"context parallelism is not supported: set {name} to 1"


def test_sleep_mode() -> None:
    text = refusal(model={"enable_sleep_mode": True})
    assert text == "sleep mode is not supported: peers may still write into KV memory that it frees; turn it off"
    assert Given(model={"enable_sleep_mode": False}).instance()


def test_progressive_push_where_a_layer_is_computed_in_two_parts() -> None:
    overlap: dict[str, Any] = {"use_ubatching": True}
    assert "remove one of" in refusal(extra={"progressive": True}, parallel=overlap)
    assert not Given(parallel=overlap).instance().options.progressive


def test_speculative_decoding() -> None:
    assert refusal(speculative=SimpleNamespace(method="ngram")).startswith("speculative decoding is not supported: ")


@pytest.mark.parametrize("engine_id", ["prefill-0", "x", FRESH.upper(), f"{FRESH}_dp", FRESH[:-1], f"{FRESH} "])
def test_a_static_engine_id_unless_it_is_allowed(engine_id: str) -> None:
    assert refusal(engine_id=engine_id) == (
        f"engine_id {engine_id!r} would be the same after a restart: remove it, or set "
        "kv_connector_extra_config.allow_static_engine_id"
    )
    allowed = Given(engine_id=engine_id, extra={"allow_static_engine_id": True}).instance()
    assert allowed.info.engine == engine_id


@pytest.mark.parametrize("engine_id", ["", "a.r1", "a\nb", "x" * 201, "\u20ac" * 67])
def test_an_engine_id_that_is_no_name(engine_id: str) -> None:
    """Ranks are named `<id>.r<number>`, and names go into messages."""
    text = refusal(engine_id=engine_id, extra={"allow_static_engine_id": True})
    assert text == f"engine_id {engine_id!r} must be 1 to 200 printable bytes without '.r'"


@pytest.mark.parametrize(
    "kind", ["MambaSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec", "SlidingWindowMLASpec", "CrossAttentionSpec"]
)
def test_models_with_groups_of_other_kinds(kind: str) -> None:
    other = type(kind, (SimpleNamespace,), {})()
    assert refusal(groups=(group(full()), group(sliding()), group(other))) == (
        f"models with 3 KV cache groups (FullAttentionSpec, SlidingWindowSpec, {kind}) are not supported; groups that "
        "are all FullAttentionSpec or SlidingWindowSpec are, and --disable-hybrid-kv-cache-manager makes one group of "
        "attention layers"
    )


@pytest.mark.parametrize("special", [{"is_eagle_group": True}, {"enable_kv_transfer": False}])
def test_groups_of_draft_layers_and_of_kv_that_is_not_moved(special: dict[str, bool]) -> None:
    other = SimpleNamespace(kv_cache_spec=full(), layer_names=["draft"], **special)
    assert refusal(groups=(group(full()), other)).startswith("models with 2 KV cache groups (FullAttentionSpec, Full")


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("block_size", 64, "128, 64"),
        ("num_kv_heads", 1, "2, 1"),
        ("head_size", 32, "64, 32"),
        ("head_size_v", 32, "64, 32"),
        ("dtype", SimpleNamespace(itemsize=2), "namespace(itemsize=4), namespace(itemsize=2)"),
    ],
)
def test_groups_that_differ(name: str, value: object, found: str) -> None:
    assert refusal(groups=(group(full()), group(sliding(**{name: value})))) == (
        f"KV cache groups with {name} {found} are not supported: {name} must be the same"
    )


def test_models_without_kv() -> None:
    assert refusal(groups=()).startswith("models with 0 KV cache groups () are not supported; ")


def test_kv_that_is_a_state() -> None:
    assert refusal(groups=(group(MambaSpec(block_size=128)),)) == (
        "KV caches of MambaSpec are not supported; those of FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec are"
    )


def test_kv_that_is_a_state_of_several_tokens() -> None:
    assert refusal(groups=(group(full(tokens_per_state=4)),)).startswith("KV caches of FullAttentionSpec are not")


def test_k_and_v_of_different_sizes() -> None:
    assert (
        refusal(groups=(group(full(head_size_v=128)),))
        == "K of 64 and V of 128 values a head are not supported: they must be equal"
    )


# Options.

PUSH_ONLY = "works with transfer_mode push only: remove it, or use push"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"transfer_mode": "Push"}, "transfer_mode is 'Push'; it must be one of push, pull"),
        ({"transfer_mode": None}, "transfer_mode is None; it must be one of push, pull"),
        ({"transport": "rdma"}, "transport is 'rdma'; it must be one of nixl, tcp, shm"),
        ({"host": 5}, "host is 5; it must be an address of this host"),
        ({"port": -1}, "port is -1; it must be a port, or 0 for any free port"),
        ({"port": 65_536}, "port is 65536; it must be a port, or 0 for any free port"),
        ({"port": True}, "port is True; it must be a port, or 0 for any free port"),
        ({"port": "5600"}, "port is '5600'; it must be a port, or 0 for any free port"),
        ({"progressive": 1}, "progressive is 1; it must be true or false"),
        ({"allow_static_engine_id": "yes"}, "allow_static_engine_id is 'yes'; it must be true or false"),
        ({"weights_version": 3}, "weights_version is 3; it must be a text that is the same for the same weights"),
        ({"events": True}, "events is True; it must be a folder"),
        ({"lease_s": 0}, "lease_s is 0; it must be a number of seconds, more than 0 and at most 86400"),
        ({"lease_s": True}, "lease_s is True; it must be a number of seconds, more than 0 and at most 86400"),
        ({"dead_s": 86_401}, "dead_s is 86401; it must be a number of seconds, more than 0 and at most 86400"),
        ({"dead_s": float("nan")}, "dead_s is nan; it must be a number of seconds, more than 0 and at most 86400"),
        ({"deadline_s": "60"}, "deadline_s is '60'; it must be a number of seconds, more than 0 and at most 86400"),
        ({"transfermode": "push"}, "transfermode is unknown: did you mean 'transfer_mode'?"),
        ({"leases": 3}, "leases is unknown: did you mean 'lease_s'?"),
        ({"static_engine_id": True}, "static_engine_id is unknown: did you mean 'allow_static_engine_id'?"),
        (
            {"transfer_mode": "pull", "progressive": True},
            "progressive works with transfer_mode push only: remove it, or use push",
        ),
    ],
)
def test_an_option_that_is_none(given: dict[str, Any], text: str) -> None:
    assert refusal(extra=given) == f"kv_connector_extra_config.{text}"


def test_an_unknown_option_without_a_likeness_names_all() -> None:
    names = ", ".join(field.name for field in attrs.fields(Options))
    assert refusal(extra={"zzz": 1}) == f"kv_connector_extra_config.zzz is unknown: expected one of {names}"


def test_all_options_are_read() -> None:
    given = {
        "transfer_mode": "push",
        "transport": "tcp",
        "host": "10.0.0.1",
        "tls_cert": "host.crt",
        "tls_key": "host.key",
        "tls_ca": "ca.crt",
        "port": 7000,
        "progressive": True,
        "allow_static_engine_id": True,
        "weights_version": "v1",
        "events": "/tmp/events",
        "lease_s": 1,
        "dead_s": 2.5,
        "deadline_s": 3,
    }
    assert set(given) == {field.name for field in attrs.fields(Options)}
    assert attrs.asdict(read_options(given)) == given
