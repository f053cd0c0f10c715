"""The manifests fit each other, the command line, the routes and the metrics; and the schemas of their kinds.

`JAXSERVE_CRDS=DIR pytest tests/test_kubernetes.py` holds them against the CustomResourceDefinitions that lie in DIR, of
LeaderWorkerSet, KEDA and the inference extension. Those are tens of thousands of lines, so they are not kept here.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxserve.parallel_options import NodeOptions
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.metrics.exposition import render
from jaxserve.tools import cli
from tests.server.engine_stats import make_stats
from tests.test_deploy import BOUNDS, DEPLOY, ROOT, TIMEOUTS, check_flags, list_endpoints

MANIFESTS = sorted(path.name for path in DEPLOY.glob("*.yaml") if "apiVersion" in path.read_text())
SETS = {"leader-worker-set-gpu.yaml": ("nvidia.com/gpu", 8), "leader-worker-set-tpu.yaml": ("google.com/tpu", 4)}
Object = dict[str, Any]


def read(name: str) -> dict[str, Object]:
    """The objects of a manifest by their kind."""
    objects = list(yaml.safe_load_all((DEPLOY / name).read_text()))
    found = {each["kind"]: each for each in objects}
    assert len(found) == len(objects)
    return found


def parse(container: Object) -> argparse.Namespace:
    check_flags(container["args"])
    return cli._make_parser().parse_args(["serve", *container["args"]])


def list_variables(container: Object) -> dict[str, Object]:
    return {each["name"]: each for each in container["env"]}


def check_pod(pod: Object, seconds_to_start: int) -> Object:
    """Asserts what every pod has: probes that are answered, no rights, places to write. Returns its container."""
    (container,) = pod["containers"]
    gets = {path for method, path in list_endpoints() if method == "GET"}
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= gets
    assert probes["liveness"]["httpGet"]["path"] == "/health/live"
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= seconds_to_start
    name, _, tag = container["image"].rpartition(":")
    dockerfile = (DEPLOY / f"Dockerfile.{tag.rpartition('-')[2]}").read_text()
    assert name and f"jaxserve:{tag}" in dockerfile
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert {"/cache", "/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    assert all("secretKeyRef" in each["valueFrom"] for each in container["env"] if re.search("KEY|TOKEN", each["name"]))
    return container


def check_server(pod: Object, container: Object) -> argparse.Namespace:
    """Asserts what a pod that answers requests has: bounds, a key, time to drain. Returns its options."""
    args = parse(container)
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["http"] == args.port
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + args.shutdown_timeout + 10
    flags = {flag[2:].partition("=")[0].replace("-", "_") for flag in container["args"]}
    assert flags >= BOUNDS | TIMEOUTS
    assert "JAXSERVE_API_KEY" in list_variables(container)
    return args


def test_deployment_fits_the_server() -> None:
    objects = read("kubernetes.yaml")
    assert set(objects) == {"PersistentVolumeClaim", "Deployment", "Service"}
    spec = objects["Deployment"]["spec"]
    pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == objects["Service"]["spec"]["selector"]
    container = check_pod(pod, 1800)
    args = check_server(pod, container)
    assert args.port == int(spec["template"]["metadata"]["annotations"]["prometheus.io/port"])
    assert [port["targetPort"] for port in objects["Service"]["spec"]["ports"]] == ["http"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claim = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]


@pytest.mark.parametrize("name", SETS)
def test_leader_worker_set_is_one_engine(name: str) -> None:
    objects = read(name)
    assert set(objects) == {"LeaderWorkerSet", "Service", "NetworkPolicy"}
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert objects["LeaderWorkerSet"]["spec"]["startupPolicy"] == "LeaderCreated", "rank 0 is ready last"
    leader, worker = (group[f"{role}Template"]["spec"] for role in ("leader", "worker"))
    first, other = check_pod(leader, 3600), check_pod(worker, 3600)
    args, following = check_server(leader, first), parse(other)
    resource, count = SETS[name]
    assert first["resources"]["limits"][resource] == other["resources"]["limits"][resource] == str(count)
    assert args.tensor_parallel_size == count * group["size"]
    assert following.model == args.model and following.init_timeout == args.init_timeout
    assert {port["containerPort"] for port in other["ports"]} == {following.health_port}
    assert following.host == "0.0.0.0", "probes come from another address"
    ports = [port["containerPort"] for port in first["ports"][1:]]
    assert ports == [NodeOptions().master_port, NodeOptions().master_port + 1]
    assert worker["terminationGracePeriodSeconds"] >= leader["terminationGracePeriodSeconds"]
    shared = [name for name in list_variables(first) if name != "JAXSERVE_API_KEY"]
    assert "JAXSERVE_CLUSTER_TOKEN" in shared and list(list_variables(other)) == shared
    volumes = {each["name"] for each in leader["volumes"]} | {
        claim["metadata"]["name"] for claim in group["volumeClaimTemplates"]
    }
    for container in (first, other):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", SETS)
def test_only_rank_0_is_a_service_and_only_http_is_open(name: str) -> None:
    objects = read(name)
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    labels = {role: group[f"{role}Template"]["metadata"]["labels"] for role in ("leader", "worker")}
    assert objects["Service"]["spec"]["selector"] == labels["leader"] != labels["worker"]
    policy = objects["NetworkPolicy"]["spec"]
    chosen = policy["podSelector"]["matchLabels"].items()
    assert chosen <= labels["leader"].items() and chosen <= labels["worker"].items()
    among_nodes, from_others = policy["ingress"]
    assert among_nodes == {"from": [{"podSelector": policy["podSelector"]}]}
    assert [port["port"] for port in from_others["ports"]] == ["http"] and "from" not in from_others


def list_gauges() -> str:
    metrics = ServerMetrics("demo")
    metrics.cache_config = {"page_size": 32, "block_size": 32, "num_gpu_blocks": 9}
    return render(metrics, None, make_stats(), "ready")[0].decode()


def test_pool_picks_among_servers_by_metrics_that_they_have() -> None:
    objects = read("inference-pool.yaml")
    pool, picker = objects["InferencePool"]["spec"], objects["Deployment"]["spec"]["template"]["spec"]
    assert pool["selector"]["matchLabels"] == read("kubernetes.yaml")["Service"]["spec"]["selector"]
    for name in SETS:
        assert pool["selector"]["matchLabels"] == read(name)["Service"]["spec"]["selector"]
    assert pool["targetPorts"] == [{"number": 8000}]
    service = objects["Service"]
    assert pool["endpointPickerRef"]["name"] == service["metadata"]["name"]
    assert pool["endpointPickerRef"]["port"]["number"] == service["spec"]["ports"][0]["port"]
    (backend,) = objects["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", objects["InferencePool"]["metadata"]["name"])
    (container,) = picker["containers"]
    settings = yaml.safe_load(objects["ConfigMap"]["data"]["config.yaml"])
    assert "--config-file=/config/config.yaml" in container["args"]
    named = {plugin["type"] for plugin in settings["plugins"]}
    assert {plugin["pluginRef"] for plugin in settings["schedulingProfiles"][0]["plugins"]} <= named
    (extractor,) = [each["parameters"] for each in settings["plugins"] if each["type"] == "core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    assert engine.pop("name") == extractor["defaultEngine"]
    text = list_gauges()
    for metric in engine.values():
        assert re.search(rf"^{metric}[ {{]", text, flags=re.M), metric
    info = re.search(rf"^{engine['cacheInfoSpec']}{{.*", text, flags=re.M)
    assert info is not None and 'block_size="' in info[0] and 'num_gpu_blocks="' in info[0]


def test_copies_follow_a_queue_that_is_measured() -> None:
    spec = read("autoscale.yaml")["ScaledObject"]["spec"]
    target = read("kubernetes.yaml")["Deployment"]
    assert spec["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert (spec["scaleTargetRef"]["apiVersion"], spec["scaleTargetRef"]["kind"]) == ("apps/v1", "Deployment")
    (trigger,) = spec["triggers"]
    (metric,) = re.findall(r"jaxserve:\w+", trigger["metadata"]["query"])
    assert re.search(rf"^{metric}[ {{]", list_gauges(), flags=re.M)


@pytest.mark.docs
def test_every_manifest_is_explained() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    assert set(MANIFESTS) - {"kubernetes.yaml"} <= set(re.findall(r"configs/deploy/([\w-]+\.yaml)", text))


def close(schema: Any) -> Any:
    """A schema of Kubernetes that takes no unknown fields, as the server prunes them without a word."""
    if isinstance(schema, list):
        return [close(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(value) for key, value in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
        closed.pop("pattern", None)
    return closed


def list_schemas(folder: Path) -> Iterator[tuple[str, str, Object]]:
    """(apiVersion, kind, schema) of each version in the CustomResourceDefinitions of a folder."""
    for path in sorted(folder.glob("*.yaml")):
        for crd in yaml.safe_load_all(path.read_text()):
            for version in crd["spec"]["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                schema["properties"].pop("metadata")
                yield f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"], close(schema)


@pytest.mark.skipif("JAXSERVE_CRDS" not in os.environ, reason="JAXSERVE_CRDS names no folder of definitions")
def test_objects_pass_the_schemas_of_their_kinds() -> None:
    schemas = {(version, kind): schema for version, kind, schema in list_schemas(Path(os.environ["JAXSERVE_CRDS"]))}
    pods = schemas["leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"]["properties"]["spec"]["properties"]
    pods = pods["leaderWorkerTemplate"]["properties"]["workerTemplate"]["properties"]["spec"]
    checked = set()
    for name in MANIFESTS:
        for kind, each in read(name).items():
            if kind == "Deployment":
                jsonschema.validate(each["spec"]["template"]["spec"], pods)
            elif (schema := schemas.get((each["apiVersion"], kind))) is not None:
                jsonschema.validate({key: value for key, value in each.items() if key != "metadata"}, schema)
                checked.add(kind)
    assert checked == {"LeaderWorkerSet", "InferencePool", "ScaledObject"}
