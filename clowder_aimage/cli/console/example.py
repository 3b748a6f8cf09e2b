"""Examples in the help of each verb, with a comment after ``#``."""

from __future__ import annotations

_NAME = "registry.example.com/team/shapes:v1"
_REPOSITORY = "registry.example.com/team/shapes"

# verb: lines
EXAMPLES = {
    "aimage": (
        "aimage create shapes examples/shapes/model",
        "aimage run shapes two red circles",
        f"aimage tag shapes {_NAME}",
        f"aimage push {_NAME}",
    ),
    "attach": (
        f"aimage attach {_NAME} sbom.json --type application/spdx+json",
        f"aimage attach --get {_REPOSITORY}@sha256:... -o sbom",
    ),
    "batch": (
        "aimage batch prompts.jsonl",
        "AIMAGE_HOST=gateway:11434 aimage batch prompts.jsonl",
        "aimage batch prompts.jsonl --retry-failed",
    ),
    "blob fetch": (f"aimage blob fetch {_REPOSITORY}@sha256:... -o weights.bin",),
    "completion": (
        "source <(aimage completion bash)        # in ~/.bashrc",
        "source <(aimage completion zsh)         # in ~/.zshrc",
        "aimage completion fish | source         # in ~/.config/fish/config.fish",
    ),
    "config show": ("aimage config show", "aimage config show --json"),
    "convert": (
        "aimage convert shapes shapes:int8 --quantize int8",
        "aimage convert shapes shapes:bf16 --dtype bf16",
    ),
    "copy": (
        f"aimage copy {_NAME} registry.example.com/prod/shapes:v1",
        f"aimage copy -r {_NAME} mirror.example.com/team/shapes:v1",
    ),
    "create": (
        "aimage create shapes examples/shapes/model",
        "aimage create zimage Tongyi-MAI/Z-Image-Turbo --quantize int8",
        f"aimage create {_NAME} . --license MIT",
        "aimage create sdxl sd_xl_base_1.0.safetensors",
    ),
    "delete": (f"aimage delete {_NAME}", f"aimage delete --force {_REPOSITORY}@sha256:..."),
    "df": ("aimage df",),
    "diff": (
        "aimage diff shapes shapes:int8",
        f"aimage diff --exit-code shapes {_NAME}",
    ),
    "du": ("aimage du", "aimage du shapes shapes:int8"),
    "export": ("aimage export shapes ./model",),
    "fleet drain": ("aimage fleet drain gpu-3", "aimage fleet drain gpu-3 --undo"),
    "fleet init": (
        "aimage fleet init --nats nats://nats.example.com",
        "aimage fleet init --replicas 3 --keep 24h",
    ),
    "fleet status": ("aimage fleet status --nats nats://nats.example.com",),
    "gateway": (
        "aimage gateway --nats nats://nats.example.com",
        "aimage gateway --nats tls://nats.example.com --nats-creds gateway.creds",
    ),
    "gc": ("aimage gc --dry-run", "aimage gc --max-size 200GB --keep 'team/*'"),
    "help": ("aimage help push", "aimage help registry serve"),
    "load": ("aimage load shapes.tar", "aimage load - --as shapes:copy < shapes.tar"),
    "login": (
        "aimage login registry.example.com",
        "aimage login registry.example.com -u alice --password-stdin < password.txt",
    ),
    "logout": ("aimage logout registry.example.com",),
    "ls": ("aimage ls", "aimage ls --filter family=z-image", "aimage ls --remote"),
    "manifest fetch": (
        f"aimage manifest fetch --pretty {_NAME}",
        f"aimage manifest fetch --config {_NAME}",
    ),
    "manifest push": (f"aimage manifest push {_NAME} manifest.json",),
    "node": (
        "aimage node --desired ./desired",
        "aimage node --desired ./desired --neighbour dns:nodes.example.com:8050",
    ),
    "node status": ("aimage node status", "aimage node status --addr 127.0.0.1:8050 --json"),
    "pin": ("aimage pin shapes",),
    "ps": ("aimage ps",),
    "pull": (
        f"aimage pull {_NAME}",
        f"aimage pull {_NAME} --component vae --limit-rate 20M",
        f"aimage pull {_NAME} --dry-run",
    ),
    "push": (f"aimage push {_NAME}", f"aimage push {_NAME} --dialect container"),
    "referrers": (f"aimage referrers {_NAME} --type application/spdx+json",),
    "registry serve": (
        "aimage registry serve --addr 127.0.0.1:5050",
        "aimage registry serve --upstream registry.example.com",
    ),
    "replay": ("aimage replay circles.png",),
    "repo ls": ("aimage repo ls registry.example.com", "aimage repo ls registry.example.com/team"),
    "resolve": (f"aimage resolve {_NAME}",),
    "rm": ("aimage rm shapes:int8",),
    "run": (
        "aimage run shapes two red circles",
        "aimage run shapes 'two red circles' --seed 42 --size 128x128 -o circles.png",
        "aimage run shapes two azure circles --lora examples/shapes/azure.safetensors:0.8",
        "aimage run shapes a blue square --image circles.png --mask mask.png --paste",
        "echo two red circles | aimage run shapes - -o - > circles.png",
        "aimage run shapes 'red ball, top' --enhancer enhancer",
        "aimage run qwen3 'why is the sky blue?' --max-tokens 100",
    ),
    "save": (
        "aimage save shapes shapes:int8 -o shapes.tar",
        "aimage save shapes -o - | ssh host aimage load -",
    ),
    "serve": (
        "aimage serve --default-model shapes",
        "aimage serve --addr 127.0.0.1:11435 --keep-alive 1h",
        "aimage serve --node --desired ./desired",
    ),
    "show": ("aimage show shapes", f"aimage show --remote {_NAME}"),
    "stop": ("aimage stop shapes",),
    "tag": (f"aimage tag shapes {_NAME}",),
    "tags": (f"aimage tags {_REPOSITORY}", f"aimage tags --long {_REPOSITORY}"),
    "unpin": ("aimage unpin shapes",),
    "validate": ("aimage validate manifest.json", "aimage validate shapes"),
    "verify": ("aimage verify", "aimage verify shapes --repair"),
    "version": ("aimage version",),
}
