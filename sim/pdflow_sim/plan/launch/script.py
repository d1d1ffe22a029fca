"""vllm.sh: a shell script that starts a planned cluster with vLLM, and a proxy in front of it.

The script is for bash 4.4 or newer, and needs no other program than vLLM and the Python that has pdflow. Everything
that depends on the cluster stands at its top; `_RUN` is the same in every script.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.version import version
from pdflow_sim.plan.launch.flags import (
    HOST,
    ROLE,
    TRANSPORT,
    VLLM_VERSION,
    connectors_for,
    engine_flags,
    transfer_config,
)
from pdflow_sim.plan.launch.hosts import GPUS_PER_HOST, PlacedEngine, placed_engines
from pdflow_sim.plan.launch.notes import launch_notes, model_id

SCRIPT_NAME: Final = "vllm.sh"
_WIDTH: Final = 116
_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer", "aggregated": "none"}


def vllm_script(scenario: Scenario) -> str:
    """Return the text of the script for a scenario's cluster."""
    resolved, document = scenario.resolved, scenario.document()
    engines = placed_engines(resolved.pools)
    lines = [*_head(resolved, document, engines), *_variables(resolved, document, engines), *_pools(resolved)]
    return "\n".join([*lines, *_configs(resolved), *_engines(resolved, engines), ""]) + _RUN


def _head(scenario: ResolvedScenario, document: Mapping[str, Any], engines: Sequence[PlacedEngine]) -> Iterator[str]:
    cluster = " + ".join(_pool_text(pool) for pool in scenario.pools)
    yield "#!/usr/bin/env bash"
    yield from _comment(
        f"Starts the cluster of scenario.toml with vLLM {VLLM_VERSION}, and a proxy in front of it: {cluster}."
    )
    yield from _comment(f"Written by pdflow {version()}; docs/launching.md describes it.")
    yield "#"
    yield "#     bash vllm.sh                 start all, print the proxy's URL, stop all with Ctrl-C"
    yield "#     DRY_RUN=1 bash vllm.sh       print the commands"
    hosts = _hosts(engines)
    if hosts > 1:
        yield "#"
        yield from _comment(
            f"The cluster takes {hosts} hosts of {GPUS_PER_HOST} GPUs. Run the script on each, with all addresses "
            "in HOSTS and the host's own position in HOST_INDEX. The proxy runs on the first."
        )
        yield "#"
        numbers = " ".join(f"ADDRESS_{number}" for number in range(min(hosts, 4))) + (" ..." if hosts > 4 else "")
        yield f'#     HOSTS="{numbers}" HOST_INDEX=0 bash vllm.sh'
    notes = list(launch_notes(scenario, document))
    if notes:
        yield "#"
        yield "# What differs from the plan:"
        for note in notes:
            yield from _comment(note, "# - ", "#   ")
    yield "set -euo pipefail"
    yield ""


def _variables(
    scenario: ResolvedScenario, document: Mapping[str, Any], engines: Sequence[PlacedEngine]
) -> Iterator[str]:
    model = model_id(scenario, document)
    rows = [
        (f"MODEL=${{MODEL:-{model}}}", "a Hugging Face id or a folder, as for vllm serve"),
        ("HOSTS=${HOSTS:-127.0.0.1}", "addresses of the hosts, separated by spaces: engines listen there"),
        ("HOST_INDEX=${HOST_INDEX:-0}", "the position of this host in HOSTS, from 0"),
        ("PROXY_HOST=${PROXY_HOST:-127.0.0.1}", "the address at which clients connect, and its port"),
        ("PORT=${PORT:-8000}", ""),
        ("ENGINE_PORT=${ENGINE_PORT:-8100}", "the port of the first engine; the others have the next ones"),
        ("SERVE=${SERVE:-vllm serve}", "the command that starts an engine"),
        ("PYTHON=${PYTHON:-python3}", "a Python in which pdflow is installed, for the proxy"),
        ("ENGINE_ARGS=${ENGINE_ARGS:-}", "more options for every engine, such as --max-model-len 32768"),
        ("LOGS=${LOGS:-vllm-logs}", "a folder for the logs"),
        ("READY_S=${READY_S:-1800}", "the longest time in seconds until all engines are ready"),
        ("DRY_RUN=${DRY_RUN:-}", "not empty: print the commands"),
    ]
    if _moves_kv(scenario):
        names = connectors_for(scenario)
        rows[5:5] = [
            (f"CONNECTOR=${{CONNECTOR:-{names[0]}}}", f"{', '.join(names[:-1])} or {names[-1]}"),
            ("TRANSPORT=${TRANSPORT:-nixl}", "of pdflow's connector: nixl or tcp"),
            ("SIDE_PORT=${SIDE_PORT:-5600}", "the first engine's port for vLLM's connectors, like ENGINE_PORT"),
        ]
    width = max(len(code) for code, _ in rows)
    for code, meaning in rows:
        yield f"{code:<{width}}  # {meaning}" if meaning else code
    yield ""
    yield f"HOSTS_NEEDED={_hosts(engines)}"


def _pools(scenario: ResolvedScenario) -> Iterator[str]:
    for index, pool in enumerate(scenario.pools):
        yield f"POOL_{index}=( # {pool.name}: {_pool_text(pool)}"
        # Options stay on the line of their values.
        flags = " ".join(flag.replace(" ", "\0") for flag in engine_flags(pool, scenario))
        lines = textwrap.wrap(flags, _WIDTH - 2, break_on_hyphens=False, break_long_words=False)
        yield from (f"  {line}".replace("\0", " ") for line in lines)
        yield ")"


def _configs(scenario: ResolvedScenario) -> Iterator[str]:
    if not _moves_kv(scenario):
        return
    yield ""
    yield "kv_config() { # ROLE HOST: print the value of --kv-transfer-config"
    yield "  local config"
    yield "  case $CONNECTOR in"
    for connector in connectors_for(scenario):
        yield f"    {connector}) config={shlex.quote(transfer_config(connector, scenario.transfer))} ;;"
    yield f'    *) fail "CONNECTOR is $CONNECTOR; it must be one of {", ".join(connectors_for(scenario))}" ;;'
    yield "  esac"
    yield f"  config=${{config/{ROLE}/$1}} config=${{config/{HOST}/$2}}"
    yield f"  printf '%s' \"${{config/{TRANSPORT}/$TRANSPORT}}\""
    yield "}"


def _engines(scenario: ResolvedScenario, engines: Sequence[PlacedEngine]) -> Iterator[str]:
    yield ""
    yield "engines() { # a line for each: name, position of its host, GPUs, port offset, role, options"
    width = max(len(engine.name) for engine in engines)
    for engine in engines:
        pool = scenario.pools[engine.pool]
        if engine.gpus > GPUS_PER_HOST:
            yield f'  fail "{engine.name} has {engine.gpus} GPUs, more than a host. Start it as vLLM documents for \\'
            yield f'several nodes, with: ${{POOL_{engine.pool}[*]}}"'
            break
        options = f'{_ROLES[pool.role]} "${{POOL_{engine.pool}[@]}}"'
        yield f"  engine {engine.name:<{width}} {engine.host} {engine.devices} {engine.port_offset} {options}"
    yield "}"


def _comment(text: str, first: str = "# ", others: str = "# ") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def _pool_text(pool: Pool) -> str:
    spread = f" DP{pool.attention_replicas}" if pool.attention_replicas > 1 else ""
    spread += f" PP{pool.pp}" if pool.pp > 1 else ""
    spread += f" EP{pool.ep}" if pool.ep > 1 else ""
    letter = {"prefill": "P", "decode": "D", "aggregated": "x"}[pool.role]
    return f"{pool.replicas}{letter} TP{pool.tp}{spread} on {pool.gpu.name}"


def _hosts(engines: Sequence[PlacedEngine]) -> int:
    last = engines[-1]
    return last.host + max(1, -(-(last.first_gpu + last.gpus) // GPUS_PER_HOST))


def _moves_kv(scenario: ResolvedScenario) -> bool:
    return any(pool.role != "aggregated" for pool in scenario.pools)


_RUN: Final = r"""
fail() {
  echo "vllm.sh: $*" >&2
  exit 2
}

quoted() { # print a command as it can be pasted
  local word line=
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
    line+="$word "
  done
  printf '%s\n' "${line% }"
}

run() { # NAME COMMAND...: start a process, or print its command
  local name=$1
  shift
  if [[ $DRY_RUN ]]; then
    quoted "$@"
    return
  fi
  echo "starting $name: $LOGS/$name.log"
  "$@" >"$LOGS/$name.log" 2>&1 &
  started=$((started + 1))
}

all_run() { # whether no process has ended; wait -n would miss one that ended before
  (($(jobs -pr | wc -l) == started))
}

engine() { # as in engines()
  local name=$1 index=$2 gpus=$3 offset=$4 role=$5
  shift 5
  local config host=${hosts[index]} port=$((ENGINE_PORT + offset)) side=$((${SIDE_PORT:-5600} + offset))
  local settings=("CUDA_VISIBLE_DEVICES=$gpus")
  local options=("$MODEL" --host "$host" --port "$port" "$@")
  [[ $host == 127.* || $host == localhost ]] || settings+=("VLLM_HOST_IP=$host")
  case $role in
    kv_producer) prefill+=("http://$host:$port") bootstrap+=("http://$host:$side") ;;
    kv_consumer) decode+=("http://$host:$port") ;;
    *) aggregated+=("http://$host:$port") ;;
  esac
  addresses+=("$host $port")
  if [[ $role != none ]]; then
    config=$(kv_config "$role" "$host")
    options+=(--kv-transfer-config "$config")
    case $CONNECTOR in
      nixl) settings+=("VLLM_NIXL_SIDE_CHANNEL_HOST=$host" "VLLM_NIXL_SIDE_CHANNEL_PORT=$side") ;;
      mooncake) settings+=("VLLM_MOONCAKE_BOOTSTRAP_PORT=$side") ;;
    esac
  fi
  if [[ $DRY_RUN && $index != "$printed" ]]; then
    echo "# on $host"
    printed=$index
  fi
  if [[ $DRY_RUN || $index == "$HOST_INDEX" ]]; then
    run "$name" env "${settings[@]}" "${serve[@]}" "${options[@]}" "${engine_args[@]}"
  fi
}

healthy() { # HOST PORT
  # shellcheck disable=SC2016
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET /health HTTP/1.0\r\n\r\n" >&3 &&
    read -r line <&3 && [[ $line == *" 200 "* ]]' "$1" "$2" 2>/dev/null
}

wait_until_ready() {
  local address host port
  for address in "${addresses[@]}"; do
    read -r host port <<<"$address"
    until healthy "$host" "$port"; do
      all_run || fail "a process ended; its log is in $LOGS"
      ((SECONDS < READY_S)) || fail "http://$host:$port is not healthy after $READY_S s; its log is in $LOGS"
      sleep 2
    done
  done
}

# shellcheck disable=SC2329
stop() { # end the processes that this script has started, and no others
  local left tries
  trap - EXIT
  trap '' INT TERM
  for ((tries = 0; tries < 60; tries++)); do
    left=$(jobs -pr)
    [[ $left ]] || return 0
    # shellcheck disable=SC2086
    ((tries)) || kill -TERM $left 2>/dev/null || true
    sleep 1
  done
  # shellcheck disable=SC2086
  kill -KILL $left 2>/dev/null || true
}

[[ $MODEL ]] || fail "set MODEL to a Hugging Face id or a folder"
read -ra hosts <<<"$HOSTS"
read -ra serve <<<"$SERVE"
read -ra engine_args <<<"$ENGINE_ARGS"
prefill=() decode=() aggregated=() bootstrap=() addresses=() printed='' started=0
if [[ $DRY_RUN ]]; then
  for ((n = ${#hosts[@]}; n < HOSTS_NEEDED; n++)); do hosts+=("ADDRESS_$n"); done
fi
((${#hosts[@]} >= HOSTS_NEEDED)) || fail "the cluster takes $HOSTS_NEEDED hosts: set HOSTS and HOST_INDEX"
((HOST_INDEX >= 0 && HOST_INDEX < HOSTS_NEEDED)) || fail "HOST_INDEX is $HOST_INDEX; it must be below $HOSTS_NEEDED"
if [[ ${CONNECTOR:-} == pdflow && ! ${PDFLOW_SECRET:-} && ! $DRY_RUN && $HOSTS != 127.* && $HOSTS != localhost ]]; then
  fail "set PDFLOW_SECRET to the same secret on all hosts (openssl rand -hex 32)"
fi

if [[ ! $DRY_RUN ]]; then
  mkdir -p "$LOGS"
  trap stop EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
fi
engines
targets=(--prefill "${prefill[@]}" --decode "${decode[@]}")
if ((${#aggregated[@]})); then targets=(--aggregated "${aggregated[@]}"); fi
if [[ ${CONNECTOR:-} == mooncake ]]; then targets+=(--mooncake "${bootstrap[@]}"); fi
proxy=("$PYTHON" -m pdflow_runtime.vllm.proxy "${targets[@]}" --host "$PROXY_HOST" --port "$PORT")
if [[ $DRY_RUN ]]; then
  echo "# on ${hosts[0]}, when all are ready"
  run proxy "${proxy[@]}"
  exit 0
fi
if ((HOST_INDEX == 0)); then
  wait_until_ready
  run proxy "${proxy[@]}"
  until healthy "$PROXY_HOST" "$PORT"; do
    kill -0 $! 2>/dev/null || fail "the proxy ended; its log is $LOGS/proxy.log"
    sleep 0.2
  done
  echo "ready: http://$PROXY_HOST:$PORT"
fi
while all_run; do sleep 1; done
fail "a process ended; its log is in $LOGS"
"""
