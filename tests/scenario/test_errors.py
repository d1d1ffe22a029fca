"""Wrong files: every error at once, each with its line. The expected texts stand beside the files, and are regenerated
with PDFLOW_REGENERATE=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario import load

WRONG = Path(__file__).parent / "wrong"
GOOD = (Path(__file__).resolve().parents[2] / "examples/reference.toml").read_text()


def problems(tmp_path: Path, text: str | bytes, *, overrides: tuple[str, ...] = ()) -> list[str]:
    """What loading this text says, without the folder."""
    file = tmp_path / "s.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        load(file, overrides=overrides)
    except ScenarioError as error:
        return [line.replace(f"{tmp_path}/", "") for line in str(error).split("\n")]
    return []


@pytest.mark.parametrize("name", ["everything", "together"])
def test_every_error_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WRONG)
    with pytest.raises(ScenarioError) as caught:
        load(f"{name}.toml")
    text = str(caught.value) + "\n"
    golden = WRONG / f"{name}.txt"
    if os.environ.get("PDFLOW_REGENERATE"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\nb = \n", "s.toml:2: is not TOML: Invalid value"),
        ("a = 1\na = 2\n", "s.toml:2: is not TOML: Cannot overwrite a value"),
        ('a = """\n\n', "s.toml:3: is not TOML: Unterminated string"),
        ("[pool]\n[pool]\n", "s.toml:2: is not TOML: Cannot declare ('pool',) twice"),
        (b"a = 1\nb = '\xff'", "s.toml:2: is not UTF-8 text; save it as UTF-8"),
        ("a = " + "[" * 100_000, "s.toml:1: is nested too deeply"),
    ],
)
def test_text_that_is_not_toml(tmp_path: Path, text: str | bytes, expected: str) -> None:
    # tomllib's columns differ between Python versions
    assert [line.partition(", column")[0] for line in problems(tmp_path, text)] == [expected]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "absent.toml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ScenarioError) as caught:
            load(path)
        assert caught.value.problems == (Problem(str(path), "", f"cannot be read: {reason}"),)


def test_errors_of_an_empty_file_name_the_required_tables(tmp_path: Path) -> None:
    assert problems(tmp_path, "") == [
        "s.toml:1: the table [workload] is missing",
        "s.toml:1: the table [model] is missing: name a preset in it, or a model's folder in serve.model",
        "s.toml:1: the table [[pool]] is missing",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("requests = 10000", "", ["s.toml:7: workload: requests is missing: arrival needs it"]),
        (
            "tp = 1",
            "tp = 3",
            ["s.toml:21: pool.prefill.tp: model 'llama-3.1-8b': tp 3 does not divide its 32 attention heads"],
        ),
        (
            'preset = "llama-3.1-8b"',
            'preset = "llama-3.1-70b"',
            [
                "s.toml:20: pool.prefill.gpu: llama-3.1-70b does not fit on 1 x h100-sxm",
                "s.toml:27: pool.decode.gpu: llama-3.1-70b does not fit on 1 x h100-sxm",
            ],
        ),
        (
            "tp = 1",
            "tp = 1\nkv_tokens = 1024",
            ["s.toml:10: workload.input_tokens: a prompt of up to 1536 tokens does not fit an engine of pool prefill"],
        ),
        (
            "tp = 1",
            "tp = 1\nblock_size = 24",
            ["s.toml:24: pool.decode.block_size: is 16, expected a divisor or a multiple of 24 (block_size of pool"],
        ),
        (
            'role = "decode"',
            'role = "prefill"',
            ['s.toml:16: pool: no pool has role = "decode", expected at least one'],
        ),
        (
            'dialect = "strict"',
            'dialect = "vllm"',
            ['s.toml:32: transfer.dialect: is "vllm", expected one of strict, as-published, vllm-compat, vllm-stock'],
        ),
        (
            "arrival = {",
            'trace = { path = "no/such.jsonl", format = "mooncake" }\narrival = {',
            [
                's.toml:9: workload.trace.path: "no/such.jsonl" does not exist; looked for no/such.jsonl',
                "s.toml:11: workload.input_tokens: cannot be combined with trace, which has its own lengths; remove it",
                "s.toml:12: workload.output_tokens: cannot be combined with trace, which has its own lengths",
            ],
        ),
        (
            "arrival = {",
            'like = "azure-cod"\n#',
            [
                's.toml:9: workload.like: is "azure-cod", expected one of mooncake-conversation, azure-code, azure-conv'
                " or the path of a model's .toml (did you mean azure-code?)",
                "s.toml:11: workload.input_tokens: cannot be combined with like, which has its own lengths; remove it",
                "s.toml:12: workload.output_tokens: cannot be combined with like, which has its own lengths; remove it",
            ],
        ),
        ('preset = "rdma-400g"', "", []),
        ("seed = 1", "", []),
    ],
)
def test_one_change(tmp_path: Path, old: str, new: str, expected: list[str]) -> None:
    found = problems(tmp_path, GOOD.replace(old, new, 1))
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(sorted(found), sorted(expected), strict=True))


def test_a_single_table_where_pools_are_meant(tmp_path: Path) -> None:
    text = GOOD[: GOOD.rindex("[[pool]]")].replace("[[pool]]", "[pool]") + "[network]\npreset = 'ideal'\n"
    assert problems(tmp_path, text) == ["s.toml:16: pool: is a table, expected an array of tables: write [[pool]]"]


def test_unequal_tp_where_neither_divides(tmp_path: Path) -> None:
    text = GOOD.replace('preset = "llama-3.1-8b"', "preset = 'qwen3-32b'\nnum_heads = 48\nnum_kv_heads = 24")
    text = text.replace("tp = 1", "tp = 2", 1).replace("tp = 1", "tp = 3", 1)
    [line] = problems(tmp_path, text)
    assert line.startswith(
        "s.toml:30: pool.decode.tp: prefill TP 2 and decode TP 3: one of the two must divide the other"
    )


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ('process = "poisson"', 'proces = "poisson"', "workload.arrival.proces: unknown key (did you mean process?)"),
        ('role = "prefill"', 'rol = "prefill"', "pool.prefill.rol: unknown key (did you mean role?)"),
        ("rate_rps = ", "rate_rp = ", "workload.arrival.rate_rp: unknown key (did you mean rate_rps?)"),
        ("[model]", "[modle]", "modle: unknown table (did you mean model?)"),
    ],
)
def test_a_misspelt_key_is_one_problem_and_not_a_missing_key_too(
    tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    assert right in GOOD
    [line] = problems(tmp_path, GOOD.replace(right, wrong, 1))
    assert line.endswith(message)


def test_a_key_that_resembles_none_leaves_the_needed_one_missing(tmp_path: Path) -> None:
    [line] = problems(tmp_path, GOOD.replace('process = "poisson"', 'sort = "poisson"'))
    assert "workload.arrival.process: is missing, expected one of poisson, gamma" in line


def test_replicated_heads_that_vllm_refuses(tmp_path: Path) -> None:
    text = GOOD.replace("tp = 1", "tp = 8", 1).replace("tp = 1", "tp = 16", 1)
    assert problems(tmp_path, text) == []
    [line] = problems(tmp_path, text.replace('"strict"', '"vllm-compat"'))
    assert line.startswith("s.toml:28: pool.decode.tp: decode TP 16 replicates 8 KV heads, which vLLM's push refuses")


def test_block_sizes_by_method_and_dialect(tmp_path: Path) -> None:
    def sound(p: int, d: int, method: str, dialect: str) -> bool:
        pools = (f"pool.prefill.block_size={p}", f"pool.decode.block_size={d}")
        sets = (*pools, f"transfer.method={method}", f"transfer.dialect={dialect}")
        return problems(tmp_path, GOOD, overrides=sets) == []

    for method in ("nixl-push", "nixl-pull"):
        assert sound(16, 64, method, "strict")
        assert sound(64, 16, method, "strict")
        assert not sound(16, 24, method, "strict")
        assert sound(16, 16, method, "vllm-compat")
    assert not sound(16, 64, "nixl-push", "vllm-compat")
    assert sound(16, 64, "nixl-pull", "vllm-compat")
    assert not sound(64, 16, "nixl-pull", "vllm-compat")


@pytest.mark.parametrize(
    ("method", "change", "expected"),
    [
        ("p2p-nccl-put", {"pool.prefill.tp": 2}, ["tp: is 1, expected 2, as pool prefill has: p2p-nccl-put as"]),
        ("p2p-nccl-get", {"pool.prefill.pp": 2}, ["pp: is 2, expected 1: p2p-nccl-get as published has no pipeline"]),
        ("cpu-staged", {"pool.decode.tp": 2}, ["tp: is 2, expected 1, as pool prefill has: cpu-staged as published"]),
        ("kv-store", {"pool.decode.tp": 2}, ["tp: is 2, expected 1, as pool prefill has: kv-store as published needs"]),
        (
            "mooncake-v0",
            {"pool.prefill.replicas": 2},
            ["replicas: is 2, expected 1: mooncake-v0 as published is one pair of engines"],
        ),
        ("mooncake-v1", {"pool.decode.tp": 2, "pool.prefill.replicas": 2, "pool.prefill.pp": 2}, []),
    ],
)
def test_what_an_original_does_not_support_is_refused_as_published(
    tmp_path: Path, method: str, change: dict[str, int], expected: list[str]
) -> None:
    pair = {"pool.prefill.replicas": 1, "pool.decode.replicas": 1, "transfer.method": method} | change
    for dialect, wrong in (("strict", []), ("as-published", expected)):
        overrides = tuple(f"{key}={value}" for key, value in (pair | {"transfer.dialect": dialect}).items())
        found = problems(tmp_path, GOOD, overrides=overrides)
        assert len(found) == len(wrong), found
        assert all(text in line for text, line in zip(wrong, found, strict=True)), found


def test_a_store_without_room_for_a_block(tmp_path: Path) -> None:
    """Each prompt was refused for itself, with every other one."""
    block = 16 * 128 * 1024
    store = ("transfer.method=kv-store", "model.preset=llama-3.1-8b", "pool.decode.tp=1", "pool.prefill.tp=1")
    assert problems(tmp_path, GOOD, overrides=(*store, f"transfer.store_bytes={block}")) == []
    assert problems(tmp_path, GOOD, overrides=(*store, f"transfer.store_bytes={block - 1}")) == [
        f"--set transfer.store_bytes={block - 1}: transfer.store_bytes: is 2,097,151, expected at least 2,097,152: "
        "one block of 16 tokens (pool decode)"
    ]
    hidden = ("transfer.store_hidden_states=true", f"transfer.store_bytes={block}")
    assert "expected at least 2,228,224" in problems(tmp_path, GOOD, overrides=(*store, *hidden))[0]
    assert problems(tmp_path, GOOD, overrides=("transfer.store_bytes=1",)) == [], "there is no store"


def test_malformed_lines_of_a_trace_are_reported_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}\n'
        "not json\n"
        '{"timestamp": 5, "input_length": -9, "output_length": 1, "hash_ids": []}\n'
    )
    start, end = GOOD.index("requests ="), GOOD.index("[model]")
    text = GOOD[:start] + 'trace = { path = "t.jsonl", format = "mooncake" }\n\n' + GOOD[end:]
    first, second, third = problems(tmp_path, text.replace("replicas = 4", "replica = 4", 1))
    assert first.endswith("pool.prefill.replica: unknown key (did you mean replicas?)")
    assert second.startswith("t.jsonl:2: ")
    assert third.startswith("t.jsonl:3: ")


@pytest.mark.parametrize(
    "override",
    [
        "workload.arrival.rate_rps=1e-300",
        "workload.arrival.rate_rps=1e-12",
        'workload.arrival={process="constant",rate_rps=1e-9}',
        "workload.arrival.rate_rps=5e-6",
        "pool.prefill.replicas=1000000000",
        "pool.decode.kv_tokens=9223372036854775807",
        "pool.prefill.cost={model='constant',prefill_s=1e300}",
        "transfer.deadline_s=1e300",
        "transfer.sync_s=1e-12",
        "network.latency_s=1e300",
        'pool.decode.gpu={preset="h100-sxm",host_step_s=1e300}',
        'model={preset="llama-3.1-8b",weight_bytes_per_param=1e300}',
    ],
)
def test_numbers_that_no_run_could_carry_are_refused(tmp_path: Path, override: str) -> None:
    """Each was a traceback, or a run that never ends."""
    [problem] = problems(tmp_path, GOOD, overrides=(override,))
    assert problem.startswith(f"--set {override}: ")
    assert "expected" in problem


def test_a_trace_that_is_a_folder(tmp_path: Path) -> None:
    start, end = GOOD.index("requests ="), GOOD.index("[model]")
    text = GOOD[:start] + 'trace = { path = ".", format = "mooncake" }\n\n' + GOOD[end:]
    [problem] = problems(tmp_path, text)
    assert '"." is not a file' in problem


def test_windows_line_ends(tmp_path: Path) -> None:
    text = GOOD.replace("seed = 1", "seed = -1").replace("\n", "\r\n")
    assert problems(tmp_path, text) == ["s.toml:5: scenario.seed: is -1, expected a number of at least 0"]


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert problems(tmp_path, b"\xef\xbb\xbf" + GOOD.encode()) == []


@pytest.mark.parametrize("name", ["a/b", "a\\nb", "a b", "\\u001b[31m"])
def test_names_that_would_break_lines_and_addresses(tmp_path: Path, name: str) -> None:
    lines = problems(tmp_path, GOOD.replace('name = "prefill"', f'name = "{name}"', 1))
    assert len(lines) == 1
    assert "pool" in lines[0]
    assert "expected letters, digits" in lines[0]


TRACE = 'trace = { path = "t.csv", format = "csv", columns = { arrival_s = "t", input_tokens = "i", output_tokens = "o"'


@pytest.mark.parametrize(
    ("workload", "slo", "expected"),
    [
        (TRACE + ', class = "c" } }', "[slo.class.chat]\nttft_ms = 5", []),
        (
            TRACE + ', class = "c" } }',
            "[slo.class.chta]\nttft_ms = 5\n[slo.class.chat]\nttft = 5",
            [
                "slo.class.chta: is no class of the workload, expected one of batch, chat (did you mean chat?)",
                "slo.class.chat.ttft: unknown key (did you mean ttft_ms?)",
            ],
        ),
        (
            TRACE + " } }",
            "[slo.class.chat]",
            ["slo.class.chat: is no class of the workload, but its requests have no classes"],
        ),
        (TRACE + " } }", "[slo]\nclass = 5", ["slo.class: is 5, expected a table"]),
        (TRACE + " } }\narrival = { process = 'constant', rate_rps = 1 }", "", []),
        (
            TRACE + ", arrival_ms = 't' } }",
            "",
            ["workload.trace.columns: arrival_s and arrival_ms all give arrival times; keep one of them"],
        ),
        (
            "trace = { path = 't.csv', format = 'csv' }",
            "",
            [
                "workload.trace.columns: is incomplete, expected at least input_tokens and output_tokens",
                'workload.trace.path: "t.csv" has no arrival times; set workload.arrival too',
            ],
        ),
        (
            TRACE + " }, dataset = 'x', start_s = 1, end_s = 0.5 }",
            "",
            ["workload.trace: end_s is 0.5, expected more than start_s, which is 1"],
        ),
        (
            TRACE + " }, dataset = 'x', start_s = 1 }\narrival = { process = 'constant', rate_rps = 1 }",
            "",
            [
                "workload.trace.dataset: has no effect with format csv, which has its own lengths; remove it",
                "workload.trace.start_s: cannot be combined with arrival, which sets the times;"
                " use skip and requests to select requests",
            ],
        ),
        (
            TRACE.replace('"t"', '"when"') + " } }",
            "",
            ["the header lacks when, expected when,i,o; for a trace without times, set workload.arrival"],
        ),
        (
            "trace = { path = 't.csv', format = 'vidur' }",
            "",
            ['workload.trace.path: "t.csv" has no arrival times; set workload.arrival too'],
        ),
        (
            "like = 'none.toml'\nrequests = 5",
            "",
            ['workload.like: "none.toml" cannot be read: No such file or directory'],
        ),
        ("like = 't.csv'\nrequests = 5", "", ['workload.like: is "t.csv", expected one of mooncake-conversation']),
    ],
)
def test_traces_models_and_classes(tmp_path: Path, workload: str, slo: str, expected: list[str]) -> None:
    (tmp_path / "t.csv").write_text("t,i,o,c\n0,1,1,chat\n1,1,1,batch\n")
    before, _, rest = GOOD.partition("[workload]")
    text = f"{before}[workload]\n{workload}\n\n[model]{rest.partition('[model]')[2].partition('[slo]')[0]}\n{slo}\n"
    found = problems(tmp_path, text)
    assert len(found) == len(expected), found
    for line, end in zip(found, expected, strict=True):
        assert line.partition(": ")[2].startswith(end)
