"""The files of deploy/: well formed, consistent with each other, and with commands and scenarios that pdflow accepts.

Nothing here runs a container. systemd-analyze and kubectl check their files where they are installed.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pdflow.cli import cli
from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.process.role import named

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document["kind"] != "Kustomization"
]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCENARIOS = {
    "compose": DEPLOY / "cluster.toml",
    "kubernetes": DEPLOY / "kubernetes/cluster.toml",
    "systemd": DEPLOY / "systemd/cluster.toml",
}
IN_IMAGE = Path("/opt/pdflow")
PLACEHOLDERS = {"POD_IP": "10.1.2.3", "PDFLOW_HOST": "10.1.2.3"}


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of a `pdflow serve` command, by pdflow's own parser."""
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None
    assert command.name == "serve"
    return command.make_context("serve", arguments[1:], resilient_parsing=False).params


def filled(variable: str, text: str, values: dict[str, str]) -> str:
    return re.sub(variable, lambda found: values[found[1]], text)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def compose_commands() -> Iterator[tuple[str, list[str]]]:
    for name, service in COMPOSE["services"].items():
        yield name, service["command"]
    (default,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    yield "router", yaml.safe_load(default)


def kubernetes_commands() -> Iterator[tuple[str, list[str]]]:
    for stateful in of_kind("StatefulSet"):
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        for number in range(stateful["spec"]["replicas"]):
            name = stateful["metadata"]["name"] + f"-{number}"
            values = {**PLACEHOLDERS, "POD_NAME": name}
            yield name, [filled(r"\$\((\w+)\)", text, values) for text in container["args"]]


def systemd_commands() -> Iterator[tuple[str, list[str]]]:
    """As systemd and the shell expand them: `$$` is `$`, and `%%` is `%`."""
    for path in UNITS:
        (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.M)
        values = {**PLACEHOLDERS, "ENGINE": "decode-1"}
        if line.startswith("/bin/sh -c "):
            script = shlex.split(line)[2].replace("$$", "$").replace("%%", "%").removeprefix("exec ")
            shown = subprocess.run(
                ["/bin/sh", "-c", f'printf "%s\\n" {script}'], env=values, capture_output=True, text=True, check=True
            )
            yield "decode-1", shown.stdout.splitlines()[1:]
        else:
            words = filled(r"\$\{(\w+)\}", line, values).split()
            assert words[0] == "/opt/pdflow/venv/bin/pdflow"
            yield "router", words[1:]


def scenario_of(kind: str) -> ResolvedScenario:
    return load(SCENARIOS[kind])


@pytest.mark.parametrize("kind", SCENARIOS)
def test_every_scenario_is_valid_and_names_its_files(kind: str) -> None:
    scenario = scenario_of(kind)
    assert {pool.name for pool in scenario.pools} == {"prefill", "decode"}, "pods and units take the role for the name"
    assert all(pool.replicas >= 2 for pool in scenario.pools), "no request fails while one engine restarts"
    assert scenario.router.on_failure == "retry"
    assert scenario.serve.port == 8000
    assert scenario.serve.secret_file


@pytest.mark.parametrize(
    ("kind", "component", "command"),
    [
        *(("compose", *each) for each in compose_commands()),
        *(("kubernetes", *each) for each in kubernetes_commands()),
        *(("systemd", *each) for each in systemd_commands()),
    ],
)
def test_every_command_is_accepted_and_names_a_component(kind: str, component: str, command: list[str]) -> None:
    options = parsed(command)
    scenario = scenario_of(kind)
    within = Path("/etc/pdflow/cluster.toml")
    if kind != "systemd":
        within = IN_IMAGE / SCENARIOS[kind].relative_to(ROOT)
    assert options["scenario"] == str(within)
    if options["role"] is None:
        assert component == "router"
        return
    assert options["host"]
    if options["role"] == "router":
        assert component.startswith("router")
        assert options["name"] is None
    else:
        assert named(scenario, options["role"], options["name"]) == component
        if kind == "compose":
            assert options["host"] == component


def test_the_containers_of_compose_have_the_secrets_that_the_scenario_names() -> None:
    serve = scenario_of("compose").serve
    for name, service in COMPOSE["services"].items():
        mounted = {f"/run/secrets/{secret}" for secret in service["secrets"]}
        expected = {serve.secret_file, serve.api_keys_file} if name == "router" else {serve.secret_file}
        assert mounted == expected, name
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
        assert float(service["stop_grace_period"].removesuffix("s")) > serve.drain_s
        assert service["image"] == "pdflow"
        assert (service["healthcheck"].get("disable") is True) == (name != "router")
    engines = {f"{pool.name}-{number}" for pool in scenario_of("compose").pools for number in range(pool.replicas)}
    assert set(COMPOSE["services"]) == {"router", *engines}
    router = COMPOSE["services"]["router"]
    assert router["ports"] == [f"{serve.port}:{serve.port}"]
    assert f":{serve.port}/health/live" in router["healthcheck"]["test"][-1]
    assert serve.router == f"router:{serve.port}"
    assert "router" in serve.host_names
    assert (DEPLOY / router["build"]["context"] / router["build"]["dockerfile"]).is_file()


def test_the_image_copies_what_is_there_and_is_not_root() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert source in kept, source
    (user,) = re.findall(r"^USER (\d+):\d+$", text, re.M)
    assert user != "0"
    assert re.search(r"^HEALTHCHECK .*\\\n.*/health/live", text, re.M)
    assert f"EXPOSE {scenario_of('compose').serve.port}" in text
    pods = [stateful["spec"]["template"]["spec"] for stateful in of_kind("StatefulSet")]
    assert {str(pod["securityContext"]["runAsUser"]) for pod in pods} == {user}


def test_pods_have_what_their_scenario_names() -> None:
    scenario = scenario_of("kubernetes")
    serve = scenario.serve
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in of_kind("StatefulSet")}
    assert replicas == {"router": 2, **{pool.name: pool.replicas for pool in scenario.pools}}
    (headless,) = (each for each in of_kind("Service") if each["metadata"]["name"] == "router-pods")
    assert headless["spec"]["clusterIP"] == "None"
    routers = [f"router-{number}.router-pods" for number in range(2)]
    assert serve.router == ", ".join(f"{name}:{serve.port}" for name in routers)
    assert set(routers) <= set(serve.host_names)
    services = {each["metadata"]["name"]: each for each in of_kind("Service")}
    for stateful in of_kind("StatefulSet"):
        component, spec = stateful["metadata"]["name"], stateful["spec"]["template"]["spec"]
        label = {"app.kubernetes.io/component": component}
        assert stateful["spec"]["selector"]["matchLabels"] == label
        assert stateful["spec"]["template"]["metadata"]["labels"] == label
        assert services[stateful["spec"]["serviceName"]]["spec"]["selector"] == label
        (container,) = spec["containers"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in spec["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["secrets"]["secret"]["defaultMode"] == 0o440, "root's, for the group: others are refused"
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
        for named_file, key in ((serve.secret_file, "secret"), (serve.api_keys_file, "api-keys")):
            assert named_file == f"{mounts['secrets']}/{key}"
        pause = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert spec["terminationGracePeriodSeconds"] > serve.drain_s + float(pause[1])


def test_probes_policies_and_budgets_of_the_manifests() -> None:
    port = scenario_of("kubernetes").serve.port
    for stateful in of_kind("StatefulSet"):
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        probes = {key: each["httpGet"]["path"] for key, each in container.items() if key.endswith("Probe")}
        if stateful["metadata"]["name"] == "router":
            assert probes == {"readinessProbe": "/health/ready", "livenessProbe": "/health/live"}
            assert [each["containerPort"] for each in container["ports"]] == [port]
        else:
            assert not probes, "engines have no port that is known before"
    components = {each["metadata"]["name"] for each in of_kind("StatefulSet")}
    budgets = {
        each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        for each in of_kind("PodDisruptionBudget")
    }
    assert budgets == components
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("NetworkPolicy")}
    assert policies["components"]["ingress"] == [{"from": [{"podSelector": {}}]}]
    (rule,) = policies["clients"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [port]
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files


def test_units_stop_after_the_drain_and_run_as_pdflow() -> None:
    drain_s = scenario_of("systemd").serve.drain_s
    for path in UNITS:
        unit = path.read_text()
        (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
        assert float(stop) > (2 * drain_s + 5 if path.name == "pdflow.service" else drain_s), path.name
        (files,) = re.findall(r"^LimitNOFILE=(\d+)$", unit, re.M)
        assert int(files) >= 65_536
        for line in ("User=pdflow", "Restart=on-failure", "NoNewPrivileges=yes"):
            assert f"\n{line}\n" in unit, (path.name, line)
    assert "\nKillMode=mixed\n" in (DEPLOY / "systemd/pdflow.service").read_text(), "the router is to end first"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace("/opt/pdflow/venv/bin/pdflow", "/bin/true")
        unit = tmp_path / path.name.replace("@", "@decode-1")
        unit.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert unit.name not in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_the_manifests(tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)
    for name in ("secret", "api-keys"):
        (folder / name).write_text(f"{name}\n")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert len(made) == len(MANIFESTS) + 2
    named_maps = {each["metadata"]["name"] for each in made if each["kind"] == "ConfigMap"}
    for stateful in (each for each in made if each["kind"] == "StatefulSet"):
        volumes = {each["name"]: each for each in stateful["spec"]["template"]["spec"]["volumes"]}
        assert volumes["scenario"]["configMap"]["name"] in named_maps
        assert volumes["secrets"]["secret"]["secretName"] == "pdflow"
    assert {each["metadata"].get("namespace") for each in made if each["kind"] != "Namespace"} == {"pdflow"}
