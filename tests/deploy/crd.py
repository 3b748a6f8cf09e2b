"""Schemas of the custom resources in deploy/kubernetes, limited to the fields used there.

Transcribed from the definitions: property names, types, required properties, and no other
properties. The API servers of clusters have the full definitions.
"""

from __future__ import annotations

from typing import Any

import jsonschema


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = _object({"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS}, "name")
_DURATION: dict[str, Any] = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}

# kubernetes: autoscaling/v2, HorizontalPodAutoscalerBehavior
_RULES = _object(
    {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "selectPolicy": {"enum": ["Max", "Min", "Disabled"]},
        "policies": _list(
            _object(
                {
                    "type": {"enum": ["Pods", "Percent"]},
                    "value": {"type": "integer", "minimum": 1},
                    "periodSeconds": {"type": "integer", "minimum": 1, "maximum": 1800},
                },
                "type",
                "value",
                "periodSeconds",
            )
        ),
    }
)

_PROMETHEUS = _object(
    {
        "type": {"const": "prometheus"},
        "name": _TEXT,
        "metricType": {"enum": ["AverageValue", "Value"]},
        "metadata": _object(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": _TEXT,
                "threshold": {"type": "string", "pattern": r"^[0-9.]+$"},
                "activationThreshold": {"type": "string"},
                "ignoreNullValues": {"enum": ["true", "false"]},
            },
            "serverAddress",
            "query",
            "threshold",
        ),
    },
    "type",
    "metadata",
)
# keda.sh, "NATS JetStream" (2.15)
_JETSTREAM = _object(
    {
        "type": {"const": "nats-jetstream"},
        "name": _TEXT,
        "metadata": _object(
            {
                "natsServerMonitoringEndpoint": {"type": "string", "pattern": r"^[a-z0-9.-]+:\d+$"},
                "account": _TEXT,
                "stream": _TEXT,
                "consumer": _TEXT,
                "lagThreshold": {"type": "string", "pattern": r"^[0-9]+$"},
                "activationLagThreshold": {"type": "string", "pattern": r"^[0-9]+$"},
                "useHttps": {"enum": ["true", "false"]},
            },
            "natsServerMonitoringEndpoint",
            "account",
            "stream",
            "consumer",
        ),
    },
    "type",
    "metadata",
)

# kedacore/keda, config/crd/bases/keda.sh_scaledobjects.yaml; keda.sh, "ScaledObject specification"
# and "Prometheus" (2.15): the names in a trigger's metadata.
SCALED_OBJECT = _object(
    {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "kind": {"const": "ScaledObject"},
        "metadata": _METADATA,
        "spec": _object(
            {
                "scaleTargetRef": _object(
                    {"apiVersion": _TEXT, "kind": _TEXT, "name": _TEXT}, "name"
                ),
                "pollingInterval": _COUNT,
                "cooldownPeriod": _COUNT,
                "minReplicaCount": _COUNT,
                "maxReplicaCount": _COUNT,
                "fallback": _object(
                    {"failureThreshold": _COUNT, "replicas": _COUNT}, "failureThreshold", "replicas"
                ),
                "advanced": _object(
                    {
                        "restoreToOriginalReplicaCount": {"type": "boolean"},
                        "horizontalPodAutoscalerConfig": _object(
                            {"behavior": _object({"scaleUp": _RULES, "scaleDown": _RULES})}
                        ),
                    }
                ),
                "triggers": _list({"oneOf": [_PROMETHEUS, _JETSTREAM]}),
            },
            "scaleTargetRef",
            "triggers",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)

# prometheus-operator/prometheus-operator,
# example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml (0.84.1)
SERVICE_MONITOR = _object(
    {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": _METADATA,
        "spec": _object(
            {
                "selector": _object({"matchLabels": _TEXTS}, "matchLabels"),
                "endpoints": _list(
                    _object(
                        {
                            "port": _TEXT,
                            "path": {"type": "string", "pattern": "^/"},
                            "scheme": {"enum": ["http", "https"]},
                            "interval": _DURATION,
                            "scrapeTimeout": _DURATION,
                            "authorization": _object(
                                {
                                    "type": _TEXT,
                                    "credentials": _object({"name": _TEXT, "key": _TEXT}, "key"),
                                }
                            ),
                            "relabelings": _list(
                                _object(
                                    {
                                        "action": _TEXT,
                                        "sourceLabels": _list(
                                            {
                                                "type": "string",
                                                "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$",
                                            }
                                        ),
                                        "targetLabel": _TEXT,
                                        "regex": _TEXT,
                                        "replacement": {"type": "string"},
                                    }
                                )
                            ),
                        },
                        "port",
                    )
                ),
            },
            "selector",
            "endpoints",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)

_URI = {"type": "string", "pattern": r"^[a-z+]+://"}
_RESOURCES = _object({"requests": _TEXTS, "limits": _TEXTS})
# kserve/kserve, config/crd/full/clusterstoragecontainer (aaac4e294dae)
STORAGE_CONTAINER = _object(
    {
        "apiVersion": {"const": "serving.kserve.io/v1alpha1"},
        "kind": {"const": "ClusterStorageContainer"},
        "metadata": _METADATA,
        "spec": _object(
            {
                "workloadType": {"enum": ["initContainer", "localModelDownloadJob"]},
                "supportedUriFormats": _list(_object({"prefix": _URI}, "prefix")),
                "container": _object(
                    {
                        "name": {"const": "storage-initializer"},
                        "image": _TEXT,
                        "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
                        "command": _list({"type": "string"}),
                        "env": _list(_object({"name": _TEXT, "value": _TEXT}, "name")),
                        "resources": _RESOURCES,
                        "securityContext": {"type": "object"},
                    },
                    "name",
                ),
            },
            "container",
            "supportedUriFormats",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
# The same, charts/kserve-crd/templates/serving.kserve.io_inferenceservices.yaml
INFERENCE_SERVICE = _object(
    {
        "apiVersion": {"const": "serving.kserve.io/v1beta1"},
        "kind": {"const": "InferenceService"},
        "metadata": _METADATA,
        "spec": _object(
            {
                "predictor": _object(
                    {
                        "model": _object(
                            {
                                "modelFormat": _object({"name": _TEXT}, "name"),
                                "storageUri": _URI,
                                "resources": _RESOURCES,
                            },
                            "modelFormat",
                        )
                    }
                )
            },
            "predictor",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)

SCHEMAS = {
    "ScaledObject": SCALED_OBJECT,
    "ServiceMonitor": SERVICE_MONITOR,
    "ClusterStorageContainer": STORAGE_CONTAINER,
    "InferenceService": INFERENCE_SERVICE,
}


def faults(document: dict[str, Any]) -> list[str]:
    """Return the violations of a custom resource's definition."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[document["kind"]])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
