"""All verbs and all routes: the doors that try each, or why it has no content of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Without:
    """The reason why a verb or a route neither gives out content of a model, nor uses it."""

    reason: str


_NAMES = Without("lists names, digests and annotations")
_REMOVES = Without("removes content, or the protection of it")
_PUBLISHES = Without("is its publisher's, who sends what this machine has")
_STATE = Without("shows or changes the state of a process, a configuration, or keys")
_CHECKS = Without("compares content with digests or signatures, and gives out none")
_FILES = Without("stores and gives out files of callers: pictures, and lines of requests")
_PAGE = Without("is part of the page, or of the description of the interface")

Tried = tuple[str, ...] | Without

VERBS: dict[str, Tried] = {
    "adapters": Without("lists the names of adapters; what it reads of them asks by the store"),
    "attach": ("attach --get",),
    "batch": Without("sends lines to a worker: see the routes of one"),
    "blob fetch": ("blob fetch",),
    "bom": ("bom NAME", "bom NAME --remote", "bom NAME --attach"),
    "completion": _STATE,
    "config show": _STATE,
    "convert": ("convert NAME out-converted --dtype f16",),
    "copy": ("copy NAME OTHER", "copy -r DIGEST OTHER"),
    "create": ("create --like", "create --from", "create --enhancer", "create --base"),
    "delete": _REMOVES,
    "df": _NAMES,
    "diff": ("diff NAME base", "diff NAME NAME --remote"),
    "doctor": _STATE,
    "du": _NAMES,
    "embed": ("embed", "embed, which pulls"),
    "export": ("export NAME out",),
    "fleet drain": _STATE,
    "fleet init": _STATE,
    "fleet key add": _STATE,
    "fleet key list": _STATE,
    "fleet key remove": _STATE,
    "fleet key rotate": _STATE,
    "fleet status": _STATE,
    "fleet user": _STATE,
    "gateway": Without("sends requests to workers: see the routes of one"),
    "gc": _REMOVES,
    "help": _STATE,
    "index": _NAMES,
    "load": ("load", "load --as"),
    "login": _STATE,
    "logout": _STATE,
    "ls": _NAMES,
    "manifest fetch": (
        "manifest fetch NAME",
        "manifest fetch DIGEST",
        "manifest fetch --config NAME",
    ),
    "manifest push": _PUBLISHES,
    "node": (
        "node, manifest",
        "node, manifest by digest",
        "node, blob",
        "node, range",
        "node, pull",
    ),
    "node status": _STATE,
    "picture show": _FILES,
    "picture verify": ("replay",),
    "pin": _REMOVES,
    "ps": _STATE,
    "pull": ("pull NAME", "pull DIGEST", "pull NAME --dry-run", "first variant"),
    "push": _PUBLISHES,
    "referrers": _NAMES,
    "registry serve": (
        "registry, manifest",
        "registry, manifest by digest",
        "registry, head",
        "registry, blob",
        "registry, config",
        "cache, manifest",
        "cache, manifest by digest",
        "cache, blob",
    ),
    "replay": ("replay",),
    "repo ls": _NAMES,
    "resolve": _NAMES,
    "rm": _REMOVES,
    "run": (
        "run",
        "run, which pulls",
        "adapter of a run",
        "control network of a run",
        "enhancer of a run",
        "picture of a run",
    ),
    "save": ("save NAME -o out.tar",),
    # A worker and the jobs of a fleet ask by these functions.
    "serve": ("find", "read", "read by digest", "lease"),
    "show": ("show NAME", "show NAME --remote"),
    "sign": _PUBLISHES,
    "sleep": _STATE,
    "stop": _STATE,
    "tag": ("tag --remote NAME moved",),
    "tags": _NAMES,
    "trust check": _CHECKS,
    "unpin": _REMOVES,
    "validate": ("validate NAME",),
    "verify": ("verify --repair",),
    "version": _STATE,
    "wake": _STATE,
}

# By the interface. A node has the routes of a worker, too, and a gateway only those.
WORKER: dict[str, Tried] = {
    "GET /": _PAGE,
    "GET /page/{name}": _PAGE,
    "GET /docs": _PAGE,
    "GET /openapi.json": _PAGE,
    "GET /healthz": _STATE,
    "GET /readyz": _STATE,
    "GET /metrics": _STATE,
    "GET /api/ps": _STATE,
    "GET /api/version": _STATE,
    "GET /v1/worker": _STATE,
    "GET /v1/fleet": _STATE,
    "GET /v1/events": _STATE,
    "GET /v1/store": _NAMES,
    "GET /v1/referrers": _NAMES,
    "GET /v1/adapters": Without("lists adapters, of which each is described as a model is"),
    "DELETE /api/delete": _REMOVES,
    "DELETE /content/{url}": _REMOVES,
    "GET /v1/jobs": _STATE,
    "GET /v1/jobs/{id}": _STATE,
    "DELETE /v1/jobs/{id}": _STATE,
    "POST /v1/files": _FILES,
    "GET /v1/files": _FILES,
    "GET /v1/files/{id}": _FILES,
    "DELETE /v1/files/{id}": _FILES,
    "GET /v1/files/{id}/content": _FILES,
    "GET /v1/files/pictures/{name}": _FILES,
    "POST /v1/batches": Without("its lines are requests to the other routes"),
    "GET /v1/batches": _STATE,
    "GET /v1/batches/{id}": _STATE,
    "POST /v1/batches/{id}/cancel": _STATE,
}
# Tried by the routes of worker_doors, which have these names
WORKER_TRIED = (
    *("GET /api/tags", "GET /v1/models", "GET /v1/models/{id}", "GET /content/"),
    *("GET /content/{url}", "POST /content/", "POST /v1/jobs"),
    *(f"POST /api/{name}" for name in "chat copy embed embeddings generate pull push show".split()),
    *(f"POST /v1/{name}" for name in "chat/completions completions embeddings".split()),
    *(f"POST /v1/images/{name}" for name in "edits generations variations".split()),
)
REGISTRY_ROUTES: dict[str, Tried] = {
    "GET /v2/": _STATE,
    "HEAD /v2/": _STATE,
    "GET /v2/_catalog": _NAMES,
    "HEAD /v2/_catalog": _NAMES,
    "GET /v2/{name}/tags/list": _NAMES,
    "HEAD /v2/{name}/tags/list": _NAMES,
    "GET /v2/{name}/referrers/{digest}": _NAMES,
    "HEAD /v2/{name}/referrers/{digest}": _NAMES,
    "GET /v2/{name}/manifests/{reference}": (
        "registry, manifest",
        "registry, manifest by digest",
        "cache, manifest",
        "cache, manifest by digest",
    ),
    "HEAD /v2/{name}/manifests/{reference}": ("registry, head",),
    "PUT /v2/{name}/manifests/{reference}": _PUBLISHES,
    "DELETE /v2/{name}/manifests/{reference}": _REMOVES,
    "GET /v2/{name}/blobs/{digest}": ("registry, blob", "registry, config", "cache, blob"),
    "HEAD /v2/{name}/blobs/{digest}": Without("tells a size"),
    "DELETE /v2/{name}/blobs/{digest}": _REMOVES,
    "POST /v2/{name}/blobs/uploads/": _PUBLISHES,
    "GET /v2/{name}/blobs/uploads/{upload}": _PUBLISHES,
    "PUT /v2/{name}/blobs/uploads/{upload}": _PUBLISHES,
    "PATCH /v2/{name}/blobs/uploads/{upload}": _PUBLISHES,
    "DELETE /v2/{name}/blobs/uploads/{upload}": _PUBLISHES,
    "GET /metrics": _STATE,
    "HEAD /metrics": _STATE,
}
NODE_ROUTES: dict[str, Tried] = {
    "GET /v1/node": _STATE,
    "POST /v1/node/retry": ("node, pull",),
    "GET /v2/": _STATE,
    "GET /v2/{name}/tags/list": _NAMES,
    "GET /v2/{name}/manifests/{reference}": ("node, manifest", "node, manifest by digest"),
    "GET /v2/{name}/blobs/{digest}": ("node, blob", "node, range"),
}
