"""The examples in deploy/: their settings are ones that a gateway takes, and their parts fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from farhand import config
from farhand.app.fleet import check_fleet_settings
from farhand.cli.run.serve import gateway as gateway_command

DEPLOY = Path(__file__).parents[2] / "deploy"


def check_settings(home: Path, environment: dict[str, str]) -> config.Config:
    """The variables are settings, and together they make a fleet."""
    given = {name: value for name, value in environment.items() if name.startswith("FARHAND_")}
    settings = config.load(home, given)
    check_fleet_settings(settings)
    sections = {name: getattr(settings, name) for name in settings.__struct_fields__}
    for name in given.keys() - {"FARHAND_HOME"}:
        section, _, key = name.removeprefix("FARHAND_").lower().partition("_")
        assert key in sections[section].__struct_fields__, name
    assert settings.gateway.tls == "off", "the balancer speaks plain HTTP to the gateways"
    return settings


def check_command(words: list[str]) -> None:
    assert words[:2] == ["farhand", "gateway"]
    gateway_command.make_context("gateway", words[2:])


def test_the_compose_file(tmp_path: Path) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services: dict[str, Any] = compose["services"]
    gateways = [name for name in services if name.startswith("gateway")]
    assert len(gateways) == 2 and {"postgres", "nats", "objects", "balancer"} <= services.keys()
    given = {"DB_PASSWORD": "p" * 48, "FARHAND_STORE_SECRET": "s" * 64}
    for name in gateways:
        service = services[name]
        environment = {
            key: re.sub(r"\$\{(\w+)\}", lambda found: given[found[1]], str(value))
            for key, value in service["environment"].items()
        }
        settings = check_settings(tmp_path, environment)
        hosts = [settings.store.url.rpartition("@")[2], settings.bus.url, settings.objects.endpoint]
        assert [next(one for one in services if one in host) for host in hosts] == ["postgres", "nats", "objects"]
        assert set(service["depends_on"]) == {"postgres", "nats", "objects"}
        words = service["command"].replace('"', " ").split()
        check_command(words[words.index("exec") + 1 :])
        (volume,) = service["volumes"]
        assert volume.endswith(f":{environment['FARHAND_HOME']}")
    assert len({service["volumes"][0] for name, service in services.items() if name in gateways}) == 2
    used = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert used - {"./haproxy.cfg"} == compose["volumes"].keys()
    balancer = (DEPLOY / "haproxy.cfg").read_text()
    assert re.findall(r"server \w+ ([\w-]+):3210 check", balancer) == gateways
    assert "GET /readyz" in balancer and "balance source" not in balancer
    assert services["balancer"]["ports"][0].startswith("127.0.0.1:")


def test_the_kubernetes_example(tmp_path: Path) -> None:
    text = (DEPLOY / "kubernetes" / "farhand.yaml").read_text()
    objects = list(yaml.safe_load_all(text))
    by_kind = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    workload = by_kind["StatefulSet", "farhand"]["spec"]
    pod = workload["template"]
    labels = pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    assert workload["replicas"] >= 2 and workload["selector"]["matchLabels"] == labels
    # Services and the disruption budget select these pods; the ingress leads to a service.
    for name in ("farhand", workload["serviceName"]):
        service = by_kind["Service", name]["spec"]
        assert service["selector"] == labels
        assert {port["targetPort"] for port in service["ports"]} <= {port["name"] for port in container["ports"]}
    assert by_kind["PodDisruptionBudget", "farhand"]["spec"]["selector"]["matchLabels"] == labels
    (rule,) = by_kind["Ingress", "farhand"]["spec"]["rules"]
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "farhand", "port": {"name": "http"}}
    # Every key of the secret is made by the command in the comment.
    keys = {
        entry["valueFrom"]["secretKeyRef"]["key"]
        for entry in container["env"]
        if "valueFrom" in entry and entry["valueFrom"]["secretKeyRef"]["name"] == "farhand"
    }
    made = dict(re.findall(r"--from-literal=([\w-]+)=(\S+)", text))
    assert keys == made.keys()
    values = {**made, "store-secret": "s" * 64}
    environment = {
        entry["name"]: entry.get("value") or values[entry["valueFrom"]["secretKeyRef"]["key"]].strip("'")
        for entry in container["env"]
    }
    settings = check_settings(tmp_path, environment)
    assert rule["host"] in settings.gateway.hosts and settings.gateway.public_url == f"https://{rule['host']}"
    check_command(container["command"])
    probes = {kind: container[kind]["httpGet"]["path"] for kind in container if kind.endswith("Probe")}
    assert probes == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    assert pod["spec"]["terminationGracePeriodSeconds"] > 10, "a gateway drains for 10 seconds"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in workload["volumeClaimTemplates"]}
    assert mounts.keys() == claims | {volume["name"] for volume in pod["spec"]["volumes"]}
    assert mounts["home"] == environment["FARHAND_HOME"] and "home" in claims
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["spec"]["securityContext"]["runAsNonRoot"]
