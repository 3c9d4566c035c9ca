"""Files for containers, Kubernetes and systemd agree with our commands, and with their schemas.

Tools that are missing skip their tests; CI has them all (`deployment` in `check.yml`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.tiers import thorough

from edgegossip.cli.command import parse_recipe
from edgegossip.cli.router_command import RouterOptions
from edgegossip.cli.worker_command import GatherOptions, WorkerOptions
from edgegossip.real.worker_folder import ENDS

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("local", "cluster", "kubeedge")
EDGE = ("kubeedge",)
OPTIONS: dict[str, type[Any]] = {
    "worker": WorkerOptions,
    "gather": GatherOptions,
    "router": RouterOptions,
}


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def check(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require_options(words: list[str]) -> Any:  # noqa: ANN401
    """Parse one of our commands, and return its options."""
    command, *rest = words
    kind = OPTIONS[command]
    if command == "router":
        known = {"--" + each.name.replace("_", "-") for each in fields(kind)}
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known
        return None
    return parse_recipe(command, kind, rest).options


# Containers.


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_commands_of_compose_are_ours(compose: dict[str, Any]) -> None:
    ranks = []
    for name, service in compose.items():
        if name == "certs":
            continue
        options = require_options(shlex.split(service["command"]))
        if name.startswith("worker"):
            ranks.append(options.rank)
            assert options.tls == Path("/certs", name)
            assert options.out == Path("/data/workers", str(options.rank))
    assert ranks == [0, 1, 2]
    issued = " ".join(f"--rank {rank}" for rank in ranks)
    assert f"--router {issued}\n" in compose["certs"]["command"][0]


def test_workers_of_compose_are_uneven_and_hardened(compose: dict[str, Any]) -> None:
    speeds = [each["cpus"] for name, each in compose.items() if name.startswith("worker")]
    assert speeds == [1.0, 0.5, 0.25]
    for service in compose.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "ports" not in service


def test_the_image_is_for_another_user_than_root_and_copies_what_it_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER (\d+):\d+$", last, re.MULTILINE)
    assert 'ENTRYPOINT ["edgegossip"]' in last
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    files = {file for words in copied for file in words.split()}
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert files == {*allowed}
    assert all((ROOT / file).exists() for file in files)


def test_the_image_is_installed_by_a_script_with_pinned_versions() -> None:
    script = DEPLOY / "install.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    check("sh", "-n", str(script))
    assert "--constraint" in script.read_text()
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@thorough
def test_the_dockerfile_passes_hadolint() -> None:
    check(tool("hadolint"), str(DEPLOY / "Dockerfile"))


@thorough
def test_the_compose_file_follows_its_schema() -> None:
    words = ["--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    check(tool("check-jsonschema"), *words)


# Kubernetes.


def rendered(overlay: str) -> str:
    return check(tool("kubectl"), "kustomize", str(KUBERNETES / "overlays" / overlay))


def objects(overlay: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(rendered(overlay))]


def named(found: list[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (each for each in found if each["kind"] == kind)


@thorough
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_follow_the_schemas(overlay: str, tmp_path: Path) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered(overlay))
    said = check(tool("kubernetes-validate"), "--strict", "--no-warn", str(path))
    # It has no schemas of cert-manager, and leaves these objects out.
    known = [each for each in objects(overlay) if "cert-manager" not in each["apiVersion"]]
    assert said.count(" passed for resource ") == len(known)


@thorough
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_pass_kubeconform_and_kube_linter(overlay: str) -> None:
    for linter in (
        ["kubeconform", "-strict", "-ignore-missing-schemas"],
        ["kube-linter", "lint"],
    ):
        if shutil.which(linter[0]):
            check(*linter, "-", stdin=rendered(overlay))
    if not (shutil.which("kubeconform") or shutil.which("kube-linter")):
        pytest.skip("neither kubeconform nor kube-linter is installed")


@thorough
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_hardened_and_watched(overlay: str) -> None:
    found = objects(overlay)
    sets = [*named(found, "StatefulSet"), *named(found, "Deployment")]
    assert len(sets) == 2
    budgets = {
        each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        for each in named(found, "PodDisruptionBudget")
    }
    for each in sets:
        template = each["spec"]["template"]
        assert template["metadata"]["labels"]["app.kubernetes.io/component"] in budgets
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {*container["resources"]["limits"]} == {"cpu", "memory"}
        assert not container["image"].endswith(":latest")
        assert ":" in container["image"]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= {*container}
        assert bool(pod.get("hostNetwork")) == (overlay in EDGE)
    policies = [each["metadata"]["name"] for each in named(found, "NetworkPolicy")]
    assert ("edgegossip-default" in policies) == (overlay not in EDGE)


@thorough
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_worker_has_a_rank_a_certificate_and_a_folder(overlay: str) -> None:
    found = objects(overlay)
    (workers,) = named(found, "StatefulSet")
    (settings,) = named(found, "ConfigMap")
    number = workers["spec"]["replicas"]
    assert settings["data"]["NUM_WORKERS"] == str(number)
    pod = workers["spec"]["template"]["spec"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    files = [
        (source["secret"]["name"], item["path"])
        for source in volumes["certs"]["projected"]["sources"]
        for item in source["secret"]["items"]
    ]
    assert files == [
        (f"edgegossip-worker-{rank}", f"worker-{rank}/{file}")
        for rank in range(number)
        for file in ("ca.pem", f"worker-{rank}.pem", f"worker-{rank}-key.pem")
    ]
    if overlay in EDGE:  # cloud storage is out of reach while a node is cut off
        assert "volumeClaimTemplates" not in workers["spec"]
        assert "hostPath" in volumes["data"]
        stay = [each for each in pod["tolerations"] if each.get("effect") == "NoExecute"]
        assert len(stay) == 2
        assert not any("tolerationSeconds" in each for each in stay)
    else:
        (claim,) = workers["spec"]["volumeClaimTemplates"]
        assert claim["metadata"]["name"] == "data"
    if overlay == "cluster":
        made = {each["spec"]["secretName"] for each in named(found, "Certificate")}
        assert made == {name for name, _ in files} | {"edgegossip-router"}


def start_pod(folder: Path, rank: int = 1) -> list[str]:
    """Run the command of a worker's pod with a program that repeats its arguments."""
    base = [*yaml.safe_load_all((KUBERNETES / "base" / "workers.yaml").read_text())]
    (workers,) = named(base, "StatefulSet")
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("edgegossip", "sleep"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (programs / name).chmod(0o755)
    script = container["args"][0].replace("/data/", f"{folder}/data/")
    script = script.replace("/tmp/ended", f"{folder}/ended")
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "RECIPE": "quickstart",
        "ALGORITHM": "gosgd",
        "NUM_WORKERS": "3",
        "ROUTER": "edgegossip-router",
        "RANK": str(rank),
    }
    done = subprocess.run(
        [*container["command"], script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_pod_starts_the_worker_of_its_rank(tmp_path: Path) -> None:
    program, *words = start_pod(tmp_path)
    assert program == "edgegossip"
    options = require_options(words)
    assert (options.rank, options.only, options.tls) == (1, "gosgd", Path("/certs"))
    assert options.connect == ("tls/edgegossip-router:7447",)
    assert options.out == tmp_path / "data" / "worker-1"
    assert options.log_format == "json"


@pytest.mark.parametrize("reason", [*ENDS, "interrupted"])
def test_a_pod_whose_worker_has_ended_waits(reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "worker-1"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(f'{{"rank": 1, "reason": "{reason}"}}')
    program, *_ = start_pod(tmp_path)
    assert program == ("sleep" if reason in ENDS else "edgegossip")
    assert (tmp_path / "ended").exists() == (reason in ENDS)


# systemd.


@thorough
@pytest.mark.parametrize("name", ["edgegossip-worker@.service", "edgegossip-router.service"])
def test_units_are_valid(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / name).read_text()
    path = tmp_path / name.replace("@", "@0")
    # The program is not installed here.
    path.write_text(text.replace("/opt/edgegossip/bin/edgegossip", "/bin/true"))
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", str(path)], capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if name.partition("@")[0] in line]
    assert ours == []


def test_commands_of_units_are_ours() -> None:
    for name, known in (("worker@", {"OPTIONS": "--num-workers 3"}), ("router", {})):
        text = (DEPLOY / "systemd" / f"edgegossip-{name}.service").read_text()
        (line,) = re.findall(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)
        line = line.replace("${RECIPE}", "quickstart").replace("%i", "2")
        for variable, value in known.items():
            line = line.replace(f"${variable}", value)
        options = require_options(shlex.split(line))
        assert name == "router" or options.rank == 2
