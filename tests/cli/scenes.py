"""Terminal sessions of users: ``tests/cli/test_users.py`` types them.

The directory ``bare`` in PYTHONPATH hides the packages of the extras.
"""

# ruff: noqa: E501  # lines as they are typed and printed

from __future__ import annotations

# A new installation
EMPTY = {
    "first steps": """
        $ aimage version
        0.1...
        $ aimage --version
        aimage, version 0.1...
        $ aimage -h
        Usage: aimage [OPTIONS] COMMAND [ARGS]...
        Models:
          create Pack a model as an AImage.
        Registries:
          push Push an AImage to its registry.
        Store:
          ls List the AImages in the store.
        Services:
          serve Serve models to clients.
        $ aimage help push
        Usage: aimage push [OPTIONS] REF...
        $ aimage ls
        ! no store at ...; 'aimage create' and 'aimage pull' add names
        $ aimage ls --store /nonexistent/dir
        ! no store at /nonexistent/dir; 'aimage create' and 'aimage pull' add names
        $ aimage create tiny examples/tiny
        sha256:...
        ! tiny:latest: 284 tensors (... parameters) and 9 files, 1.2 MB; ...
        $ aimage ls
        NAME ...
        tiny:latest ...
        $ aimage rm tiny
        tiny:latest
        $ aimage ls
        NAME ...
        ! ...; 'aimage create' and 'aimage pull' add names
    """,
    "help with examples": """
        $ aimage push --help
        Usage: aimage push [OPTIONS] REF...
        Examples:
        aimage push registry.example.com/team/shapes:v1
        $ aimage help registry serve
        Usage: aimage registry serve [OPTIONS]
        Examples:
        aimage registry serve --addr 127.0.0.1:5050
        $ aimage help pusj # exit code 2
        ! did you mean 'aimage push'?
    """,
    "a bare installation": """
        $ aimage create -q shapes examples/shapes/model
        $ PYTHONPATH=bare:$PYTHONPATH aimage run shapes two red circles # exit code 2
        ! aimage: ... extra [mlx]...
        ! ... install ...mlx...]'
        $ PYTHONPATH=bare:$PYTHONPATH aimage serve # exit code 2
        ! aimage: ... extra [worker]...
        ! ... install ...worker]'
        $ PYTHONPATH=bare:$PYTHONPATH aimage create q examples/tiny --quantize int8 # exit code 2
        ! aimage: ... extra [mlx]...
        $ PYTHONPATH=bare:$PYTHONPATH aimage registry serve # exit code 2
        ! aimage: ... extra [server]...
    """,
    "ports of other programs": """
        $ aimage registry serve --addr localhost:11434 # exit code 1
        ! aimage: cannot listen on localhost:11434: Address already in use; ollama answers there
        ! ...--addr...
        $ aimage serve --addr localhost:11434 # exit code 1
        ! aimage: cannot listen on localhost:11434: Address already in use; ollama answers there
        ! ...--addr...
        $ aimage pull localhost:6500/team/tiny:v1 # exit code 1
        ! aimage: localhost:6500 is the AirPlay receiver of macOS, not a registry (403)
        ! use another port, or turn off the AirPlay receiver in the system settings
    """,
    "slips of verbs": """
        $ aimage puls tiny # exit code 2
        ! aimage: unknown verb 'puls'
        ! did you mean 'aimage pull'?
        $ aimage shwo tiny # exit code 2
        ! did you mean 'aimage show'?
        $ aimage build . # exit code 2
        ! 'aimage create' packs a model directory
        $ aimage import x.tar # exit code 2
        ! 'aimage create' packs a model directory, 'aimage load' reads a tar file
        $ aimage search flux # exit code 2
        ! 'aimage tags' lists the tags of a repository, ...
        $ aimage whoami # exit code 2
        ! 'aimage login HOST' checks the stored credentials of a registry
        $ aimage cat tiny # exit code 2
        ! 'aimage manifest fetch' prints a manifest, 'aimage blob fetch' a blob
        $ aimage fetch tiny # exit code 2
        ! 'aimage pull' fetches an AImage, 'aimage manifest fetch' a manifest
        $ aimage frobnicate # exit code 2
        ! 'aimage --help' lists the verbs
        $ aimage pull tiny --frobnicate # exit code 2
        ! aimage: no such option '--frobnicate'...
        ! see: aimage pull --help
        $ aimage create tiny examples/tiny --artifact-type application/x # exit code 2
        ! aimage: no such option '--artifact-type'
        ! the type of an AImage is fixed; 'aimage attach --type' sets that of files
        $ aimage pull localhost:1/team/tiny -o here # exit code 2
        ! 'aimage export' writes the files of a model, ...
        $ aimage pull localhost:1/team/tiny --tls-verify=false # exit code 2
        ! --insecure does not verify certificates, --plain-http uses HTTP
        $ aimage images --digests # exit code 2
        ! --no-trunc shows whole digests
        $ aimage completion # exit code 2
        ! aimage: missing argument 'bash|zsh|fish'. Choose from: bash, zsh, fish
        $ aimage frobnicate --json # exit code 2
        ! {"event": "error", "level": "error", "code": "UsageError", "exit": 2, "message": "unknown verb 'frobnicate'", ...}
    """,
    "completion": """
        $ aimage completion bash
        ..._AIMAGE_COMPLETE=bash_complete ...
        $ aimage completion zsh
        ..._AIMAGE_COMPLETE=zsh_complete ...
        $ aimage completion fish
        ..._AIMAGE_COMPLETE=fish_complete ...
    """,
    "names that are none": """
        $ aimage pull tiny # exit code 2
        ! aimage: tiny:latest has no registry host: ...
        ! use a name with a host, such as registry.example.com/tiny:latest; ...
        $ aimage push localhost:1/team/tiny:v1,v2 # exit code 2
        ! aimage: invalid reference 'localhost:1/team/tiny:v1,v2': invalid tag 'v1,v2'
        ! use several names: localhost:1/team/tiny:v1 localhost:1/team/tiny:v2
        $ aimage pull Tiny # exit code 2
        ! aimage: invalid reference 'Tiny'
        ! use lower case: tiny
        $ aimage pull https://localhost:6100/team/tiny:v1 # exit code 2
        ! aimage: invalid reference 'https://localhost:6100/team/tiny:v1': invalid host 'https:'
        ! omit https://, as in localhost:6100/team/tiny:v1
        $ aimage pull oci://localhost:6100/team/tiny:v1 # exit code 2
        ! omit oci://, as in localhost:6100/team/tiny:v1
        $ aimage pull hf.co/black-forest-labs/FLUX.1-dev # exit code 2
        ! aimage: 'hf.co/black-forest-labs/FLUX.1-dev' is a model of the Hugging Face hub, and not a reference
        ! to pack it: aimage create NAME hf://black-forest-labs/FLUX.1-dev
        $ aimage run hf.co/black-forest-labs/FLUX.1-dev 'a fox' # exit code 2
        ! to pack it: aimage create NAME hf://black-forest-labs/FLUX.1-dev
        $ aimage run ./nowhere.gguf 'a fox' # exit code 3
        ! aimage: ./nowhere.gguf does not exist
        $ aimage show tiny # exit code 3
        ! aimage: tiny:latest not found in the store ...
        ! 'aimage ls' lists the names in the store; 'aimage pull' fetches from a registry
        $ aimage rm tiny # exit code 3
        ! aimage: tiny:latest not found ...
        $ aimage create tiny nowhere # exit code 3
        ! aimage: nowhere does not exist
        $ aimage tags localhost:6100 # exit code 2
        ! aimage: expected HOST/REPOSITORY, not localhost:6100
        ! 'aimage repo ls localhost:6100' lists the repositories of a registry
        $ aimage pull localhost:1/team/tiny # exit code 1
        ! aimage: cannot reach localhost:1: Connection refused
        ! check the host and the port, and that the registry is running
        $ aimage pull localhost:1/team/tiny --concurrency 4 # exit code 1
        ! aimage: cannot reach localhost:1: Connection refused
        $ aimage pull localhost:1/team/tiny --max-workers 4 # exit code 1
        ! aimage: cannot reach localhost:1: Connection refused
    """,
    "models of the Hugging Face hub": """
        $ HF_HUB_OFFLINE=1 aimage create zimage:turbo Tongyi-MAI/Z-Image-Turbo # exit code 3
        ! aimage: Tongyi-MAI/Z-Image-Turbo is not in the Hugging Face cache ... in full
        ! HF_HUB_OFFLINE is set: unset it to fetch the model
        $ HF_HUB_OFFLINE=1 aimage create tiny https://huggingface.co/Tongyi-MAI/Z-Image-Turbo # exit code 3
        ! aimage: Tongyi-MAI/Z-Image-Turbo is not in the Hugging Face cache ... in full
        $ HF_HUB_OFFLINE=1 aimage create tiny hf://Tongyi-MAI/Z-Image-Turbo@v1 # exit code 3
        ! aimage: Tongyi-MAI/Z-Image-Turbo@v1 is not in the Hugging Face cache ... in full
    """,
    "TLS on this machine": """
        $ aimage resolve localhost:6443/team/tiny:v1 --ca-file ca.pem
        sha256:...
        $ aimage resolve localhost:6443/team/tiny:v1 --insecure
        sha256:...
        ! warning: TLS certificate not verified; the connection can be intercepted
        $ echo '{"registries": {"localhost:6443": {"plainHttp": false, "caFile": "'$PWD'/ca.pem"}}}' > tls.json
        $ AIMAGE_CONFIG=tls.json aimage resolve localhost:6443/team/tiny:v1
        sha256:...
        $ aimage tags localhost:6444/team/tiny # exit code 1
        ! aimage: ... 400 ... Client sent an HTTP request to an HTTPS server.
        ! the registry may expect HTTPS: omit --plain-http; for a loopback host, use --ca-file or --insecure, ...
        $ aimage tags localhost:6443/team/tiny --plain-http --insecure # exit code 2
        ! aimage: --plain-http cannot be combined with --insecure, --ca-file or --cert-file
        $ aimage tags localhost:6443/team/tiny --ca-file password.txt # exit code 1
        ! aimage: password.txt contains no certificate
        ! expected PEM: -----BEGIN CERTIFICATE-----
    """,
    "another server where the worker is expected": """
        $ AIMAGE_HOST=localhost:11434 aimage ps # exit code 1
        ! aimage: the server at http://localhost:11434 is not an aimage worker; ollama answers there
        ! set AIMAGE_HOST to the address of a worker; 'aimage serve --addr HOST:PORT' starts one
        $ AIMAGE_HOST=localhost:11434 aimage rm --remote llama3.2:1b # exit code 1
        ! aimage: the server at http://localhost:11434 is not an aimage worker; ollama answers there
        $ AIMAGE_HOST=localhost:11434 aimage stop llama3.2:1b # exit code 1
        ! aimage: the server at http://localhost:11434 is not an aimage worker; ollama answers there
        $ AIMAGE_HOST=localhost:1 aimage ps # exit code 1
        ! aimage: cannot connect to the worker at http://localhost:1: Connection refused
        ! start one with 'aimage serve', or set AIMAGE_HOST to another
    """,
    "models that people have": """
        $ mkdir sd && cp -r examples/tiny/vae examples/tiny/scheduler sd
        $ echo '{"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "AutoencoderKL"], "scheduler": ["diffusers", "PNDMScheduler"]}' > sd/model_index.json
        $ aimage create sd15 sd
        sha256:...
        $ aimage run --local sd15 a fox # exit code 1
        ! aimage: only ZImagePipeline and Flux2KleinPipeline can be run; sd15:latest is StableDiffusionPipeline
        ! export it and run it with diffusers: aimage export sd15:latest DIR
        $ aimage export sd15 sd15
        sd15
        $ diff -r sd sd15
        $ cp sd/vae/diffusion_pytorch_model.safetensors ckpt.safetensors
        $ aimage create sdxl ckpt.safetensors
        sha256:...
        $ aimage run --local sdxl a fox # exit code 1
        ! aimage: sdxl:latest has the format 'safetensors', which cannot be run
        ! to get its files: aimage export sdxl:latest DIR
        $ aimage export sdxl sdxl
        sdxl
        $ cmp ckpt.safetensors sdxl/ckpt.safetensors
        $ aimage create vae sd/vae
        sha256:...
        $ aimage run --local vae a fox # exit code 1
        ! aimage: only ZImagePipeline and Flux2KleinPipeline can be run; vae:latest is AutoencoderKL
        $ aimage export vae vae
        vae
        $ diff -r sd/vae vae
        $ printf '\\200\\002}.' > old.ckpt
        $ aimage create old old.ckpt # exit code 1
        ! aimage: old.ckpt is pickled: loading it can execute arbitrary code, so it is not packed
        $ aimage create old old.ckpt --whole-files
        sha256:...
    """,
    "configuration": """
        $ echo '{"worker": {"addr": "127.0.0.1:11501", "keepAlive": "1h", "defaultModle": "x"}}' > pc.json
        $ AIMAGE_CONFIG=pc.json aimage serve # exit code 2
        ! aimage: ... pc.json: ... unknown key 'defaultModle'; did you mean 'defaultModel'? (at worker)
        $ AIMAGE_SERVE_KEEPALIVE=5m aimage config show # exit code 2
        ! aimage: unknown environment variable AIMAGE_SERVE_KEEPALIVE
        ! did you mean AIMAGE_SERVE_KEEP_ALIVE?
        $ echo '{"registries": {"a": {"mirror": ["x"]}}}' > bad.json
        $ aimage validate bad.json # exit code 5
        bad.json:1:17: /registries/a: unknown key 'mirror'; did you mean 'mirrors'?
        $ printf '# comment\\nworker: {keepAlive: 1h, memory: 12GB}\\n' > pc.yaml
        $ AIMAGE_CONFIG=pc.yaml aimage config show
        config pc.yaml AIMAGE_CONFIG
        worker.memory 12GB pc.yaml
        worker.keepAlive 1h pc.yaml
    """,
}

# A store with the models tiny and shapes
STOCKED = {
    "names of verbs elsewhere": """
        $ aimage list
        shapes:latest ...
        tiny:latest ...
        $ aimage images
        shapes:latest ...
        $ aimage inspect tiny
        family z-image
        $ aimage info tiny
        family z-image
        $ aimage tag tiny old
        $ aimage rmi old
        old:latest
        $ aimage create -q localhost:5000/elsewhere/tiny:v1 examples/tiny --whole-files
        sha256:2bad...
        $ aimage push -q localhost:5000/elsewhere/tiny:v1
        sha256:2bad...
        $ aimage digest localhost:5000/elsewhere/tiny:v1
        sha256:2bad...
        $ aimage cp localhost:5000/elsewhere/tiny:v1 localhost:5000/elsewhere/tiny:v2
        sha256:2bad...
        $ aimage catalog localhost:5000/elsewhere
        localhost:5000/elsewhere/tiny
        $ aimage discover localhost:5000/elsewhere/tiny:v1
        ! nothing is attached ...
    """,
    "lists as elsewhere": """
        $ aimage ls --filter family=z-image -q
        shapes:latest
        tiny:latest
        $ aimage images --filter reference=tiny --no-trunc
        tiny:latest z-image BF16 1.2 MB ... sha256:1977...
        $ aimage list --format json
        [{"reference": "shapes:latest", ...
        $ aimage ls -f label=x # exit code 2
        ! aimage: invalid value for '-f' / '--filter': 'label=x' is not FIELD=PATTERN with one of reference, ...
        $ AIMAGE_STROE=x aimage ls -q
        tiny:latest
        ! warning: unknown environment variable AIMAGE_STROE; did you mean AIMAGE_STORE?
    """,
    "a registry looked at": """
        $ aimage create -q localhost:5000/looked/tiny:v1 examples/tiny --whole-files
        sha256:2bad...
        $ aimage push localhost:5000/looked/tiny:v1
        sha256:2bad...
        ! pushed 13 blobs, 1.2 MB in all
        $ aimage resolve localhost:5000/looked/tiny:v1
        sha256:2bad360cae01...
        $ aimage manifest fetch localhost:5000/looked/tiny:v1 | jq -r .artifactType
        application/vnd.clowder.aimage.manifest.v1+json
        $ aimage manifest fetch --config localhost:5000/looked/tiny:v1 | jq -r .license
        apache-2.0
        $ aimage show --remote localhost:5000/looked/tiny:v1
        format files
        $ aimage manifest fetch --pretty localhost:5000/looked/tiny:v1
        "artifactType": "application/vnd.clowder.aimage.manifest.v1+json",
        $ aimage blob fetch localhost:5000/looked/tiny $(aimage manifest fetch localhost:5000/looked/tiny:v1 | jq -r .config.digest) | jq -r .license
        apache-2.0
        $ aimage blob fetch localhost:5000/looked/tiny sha256:12 -o blob # exit code 2
        ! aimage: invalid reference ...: invalid sha256 digest: '12'
        $ aimage repo ls localhost:5000
        localhost:5000/looked/tiny
        $ aimage tags localhost:5000/looked/tiny
        v1
        $ aimage tags localhost:5000/looked/tiny:v1 # exit code 2
        ! aimage: expected HOST/REPOSITORY without a tag or digest, not localhost:5000/looked/tiny:v1
        ! use: aimage tags localhost:5000/looked/tiny
        $ aimage tags --long localhost:5000/looked/tiny
        TAG DIGEST TYPE
        v1 sha256:2bad... application/vnd.oci.image.manifest.v1+json
        $ aimage copy localhost:5000/looked/tiny:v1 localhost:5000/looked/tiny:latest
        sha256:2bad...
        $ aimage tag --remote localhost:5000/looked/tiny:v1 v1.1 newest
        localhost:5000/looked/tiny:v1.1 sha256:2bad...
        localhost:5000/looked/tiny:newest sha256:2bad...
        $ aimage tag --remote localhost:5000/looked/tiny:none v3 # exit code 3
        ! aimage: manifest localhost:5000/looked/tiny:none not found at localhost:5000 (404 ...)
        $ aimage resolve -v localhost:5000/looked/tiny:newest
        sha256:2bad...
        ! HEAD http://localhost:5000/v2/looked/tiny/manifests/newest 200 ... ms
        $ aimage resolve -vv localhost:5000/looked/tiny:newest -H 'X-Trace: 1'
        sha256:2bad...
        ! > X-Trace: ...
        ! < Docker-Content-Digest: sha256:2bad...
        $ aimage resolve registry.example:443/looked/tiny:v1 --plain-http --resolve registry.example:443:127.0.0.1 # exit code 1
        ! aimage: cannot reach registry.example:443: ...
        $ aimage delete localhost:5000/looked/tiny:v1 # exit code 2
        ! aimage: the tag localhost:5000/looked/tiny:v1 (sha256:...) is not deleted: stdin is not a terminal, so that nobody can confirm it
        ! --yes deletes without asking
        $ aimage resolve localhost:5000/looked/tiny:v2 # exit code 3
        ! aimage: manifest localhost:5000/looked/tiny:v2 not found at localhost:5000 (404 ...)
        $ aimage resolve tiny # exit code 2
        ! aimage: tiny:latest has no registry host: ...
    """,
    "promotion with evidence": """
        $ aimage create -q localhost:5000/staging/tiny:v1 examples/tiny --whole-files
        sha256:2bad...
        $ aimage push -q localhost:5000/staging/tiny:v1
        sha256:2bad...
        $ aimage referrers localhost:5000/staging/tiny:v1
        ! nothing is attached to localhost:5000/staging/tiny:v1
        $ aimage attach localhost:5000/staging/tiny:v1 absent.json --artifact-type x/y # exit code 3
        ! aimage: file not found: absent.json
        $ aimage attach localhost:5000/staging/tiny:v1 . --artifact-type x/y # exit code 2
        ! aimage: . is a directory, not a file
        $ aimage attach localhost:5000/staging/tiny:v1 password.txt --artifact-type X # exit code 2
        ! aimage: invalid media type 'X'
        ! for example: --type application/spdx+json
        $ echo '{}' > sbom.json
        $ aimage attach -q localhost:5000/staging/tiny:v1 sbom.json --artifact-type application/spdx+json
        sha256:...
        $ aimage copy localhost:5000/staging/tiny:v1 localhost:5000/prod/tiny:v1 --recursive
        sha256:2bad...
        $ aimage referrers localhost:5000/prod/tiny:v1
        DIGEST TYPE ...
        sha256:... application/spdx+json ...
        $ aimage attach --get localhost:5000/prod/tiny@$(aimage referrers localhost:5000/prod/tiny:v1 --json | jq -r '.[0].digest') -o got
        got/sbom.json
        $ cat got/sbom.json
        {}
        $ aimage pull -q localhost:5000/prod/tiny@$(aimage referrers localhost:5000/prod/tiny:v1 --json | jq -r '.[0].digest')
        sha256:...
        $ aimage export localhost:5000/prod/tiny@$(aimage referrers localhost:5000/prod/tiny:v1 --json | jq -r '.[0].digest') files # exit code 5
        ! aimage: sha256:... is not an AImage (application/spdx+json)
        ! ...; 'aimage attach --get' writes the files of an attachment
        $ aimage tag localhost:5000/staging/tiny:v1 localhost:5000/staging/tiny:v2
        $ aimage push -q localhost:5000/staging/tiny:v2
        $ aimage copy --all-tags localhost:5000/staging/tiny localhost:5000/archive/tiny
        $ aimage tags localhost:5000/archive/tiny
        v1
        v2
    """,
    "several names": """
        $ aimage create -q localhost:5000/several/tiny:v1 examples/tiny --whole-files
        sha256:2bad...
        $ aimage tag localhost:5000/several/tiny:v1 localhost:5000/several/tiny:v2
        $ aimage push -q localhost:5000/several/tiny:v1 localhost:5000/several/tiny:v2
        sha256:2bad...
        sha256:2bad...
        $ aimage pull -q --store other localhost:5000/several/tiny:v1 localhost:5000/several/tiny:v2
        sha256:2bad...
        sha256:2bad...
    """,
    "short names": """
        $ aimage create -q localhost:5000/models/zimage examples/tiny --whole-files
        sha256:2bad...
        $ aimage push -q localhost:5000/models/zimage
        sha256:2bad...
        $ echo '{"registries": {"default": "localhost:5000/models"}}' > default.json
        $ AIMAGE_CONFIG=default.json aimage pull zimage --store other
        sha256:2bad...
        $ aimage show zimage --store other
        format files
        $ AIMAGE_CONFIG=default.json aimage pull nothing # exit code 3
        ! aimage: manifest nothing:latest not found at localhost:5000 (404 ...)
    """,
    "scripts": """
        $ aimage show nothing --json # exit code 3
        ! {"event": "error", "level": "error", "code": "NotFoundError", "exit": 3, "message": "nothing:latest not found ...", "hint": "..."}
        $ aimage ls --json | jq -r '.[].reference'
        shapes:latest
        tiny:latest
        $ aimage ls --format '{{ reference }}'
        shapes:latest
        tiny:latest
        $ aimage ls --format '{{ reference' # exit code 2
        ! aimage: invalid template, line 1: ...
        $ aimage show tiny --layers | head -n 1
        ...
        $ aimage pull localhost:1/x --jobs 0 # exit code 2
        ! aimage: invalid value for '--jobs': ...
    """,
    "archives": """
        $ aimage save tiny -o tiny.tar
        tiny.tar
        $ aimage load tiny.tar --store other
        tiny:latest sha256:1977...
        $ aimage save tiny | aimage load --store third
        tiny:latest sha256:1977...
        $ aimage load -i tiny.tar --store third
        tiny:latest sha256:1977...
        $ head -c 400000 tiny.tar > short.tar
        $ aimage load short.tar --store fourth # exit code 5
        ! aimage: short.tar contains ... past its end: it is damaged or truncated
        $ rm short.tar
        $ aimage load password.txt # exit code 5
        ! aimage: password.txt is not a tar ...
    """,
    "the store read by another tool": """
        $ skopeo inspect --raw oci:store:tiny:latest | jq -r .artifactType
        application/vnd.clowder.aimage.manifest.v1+json
    """,
    "room on the disk": """
        $ aimage tag shapes other
        $ aimage rm absent tiny gone # exit code 3
        ! aimage: absent:latest, gone:latest not found in the store ...; nothing was removed
        $ aimage rm tiny
        tiny:latest
        ! 1.3 MB can be freed with: aimage gc
        $ aimage gc
        removed: 292 blobs, 1.3 MB
        $ aimage rm shapes
        shapes:latest
        $ aimage show other
        family z-image
        $ aimage gc --max-size 1MB --keep 'other*' --dry-run
        ! ... kept, more than 1 MB: ... needed by names that are pinned, kept or in use
        $ aimage rm other --gc
        other:latest
        ! freed ... MB (... blobs)
    """,
    "names and digests": """
        $ aimage ls
        NAME FAMILY TYPE SIZE CREATED DIGEST
        shapes:latest z-image BF16 7.92 MB ...
        tiny:latest z-image BF16 1.2 MB ... 1977a2cdb4bc
        $ aimage ls 'ti*' -q
        tiny:latest
        $ aimage ls llama
        ! no names match llama
        $ aimage show 1977a2cdb4bc
        name tiny:latest
        $ aimage tag sha256:1977 again
        sha256:1977...
        $ aimage rm 1977a2cdb4bc # exit code 2
        ! aimage: 1977a2cdb4bc has several names: again:latest, tiny:latest
        ! use one of them
        $ aimage show 3fdb # exit code 3
        ! aimage: 3fdb:latest not found in the store ...
    """,
}

PRIVATE = {
    "logging in": """
        $ aimage login localhost:5001 -u operator --password-stdin < password.txt
        ! logged in to localhost:5001 as operator; the credentials are stored in ...
        $ aimage create -q localhost:5001/team/tiny:v1 examples/tiny --whole-files
        sha256:2bad...
        $ aimage push -q localhost:5001/team/tiny:v1
        sha256:2bad...
        $ aimage logout localhost:5001
        $ aimage logout localhost:5001 # exit code 3
        $ aimage pull localhost:5001/team/tiny:v1 # exit code 4
        ! log in with: aimage login localhost:5001
        $ aimage pull -q localhost:5001/team/tiny:v1 -u operator -p 'open sesame' --store other
        sha256:2bad...
        $ aimage pull localhost:5001/team/tiny:v1 -u operator -p wrong --store other # exit code 4
        ! aimage: localhost:5001 requires valid credentials for manifest localhost:5001/team/tiny:v1 (401 ...)
        $ echo wrong | aimage login localhost:5001 -u operator --password-stdin # exit code 4
        ! aimage: login failed: localhost:5001 rejected the username or password
    """,
}

# Pictures of 32 x 32 pixels in one step
GENERATE = {
    "prompts": """
        $ aimage run shapes two red circles --steps 1 --size 32x32 --seed 1
        two-red-circles-1.png
        ! 1 picture in ...
        $ echo 'two red circles' | aimage run shapes --steps 1 --size 32x32 --seed 2
        two-red-circles-2.png
        $ echo 'two red circles' | aimage run shapes - --steps 1 --size 32x32 --seed 3
        two-red-circles-3.png
        $ aimage run shapes '' # exit code 2
        ! aimage: the prompt is empty
        $ aimage run shapes x --size 512 # exit code 2
        ! aimage: size must be "auto" or WIDTHxHEIGHT, such as "1024x1024"
        $ aimage run shapes x --negative blue # exit code 2
        ! aimage: negative requires guidance above 0
        ! a guidance of 4 is common
    """,
    "language models": """
        $ aimage create -q enhancer examples/shapes/enhancer
        sha256:...
        $ aimage run enhancer 2 blue boxes
        two blue squares
        $ aimage run enhancer 2 blue boxes --steps 4 # exit code 2
        ! aimage: --steps applies to pictures; enhancer:latest is a language model
        $ aimage run shapes red ball --top-p 0.5 # exit code 2
        ! aimage: --top-p applies to language models; shapes:latest generates pictures
        $ aimage run shapes red ball --enhance # exit code 2
        ! aimage: no language model is named for --enhance
        $ aimage run shapes red ball --enhancer enhancer --steps 1 --size 64x64 --seed 1
        red-ball-1.png
        ! prompt: a red circle
        $ aimage chat enhancer # exit code 2
        ! 'aimage run' answers with a language model
    """,
    "options of other tools": """
        $ aimage run shapes a fox -s 1 --size 32x32 --seed 4 --num-images 2 --negative-prompt blue --guidance-scale 2 -o a.png
        a-1.png
        a-2.png
        $ aimage run shapes a fox --num-inference-steps=1 --size 32x32 --seed 4 --num-images=2 --negative-prompt=blue --cfg=2 -o b.png
        b-1.png
        b-2.png
        $ cmp a-2.png b-2.png
        $ aimage run shapes a fox --num-images none # exit code 2
        ! aimage: n must be a whole number from 1 to 1024
    """,
    "places of pictures": """
        $ aimage run shapes 'a fox' --steps 1 --size 32x32 --seed 1 -o pics/
        pics/a-fox-1.png
        $ aimage run shapes 'a fox' --steps 1 --size 32x32 --seed 1 -o out.jpg
        out.jpg
        $ aimage run -q shapes 'a fox' --steps 1 --size 32x32 --seed 1 -o - | head -c 4
        ...PNG
        $ aimage run --no-show shapes 'a fox' --steps 1 --size 32x32 --seed 2
        ...-2.png
        $ TERM_PROGRAM=WezTerm aimage run shapes 'a fox' --steps 1 --size 32x32 --seed 3 | wc -l
        1
        $ aimage run shapes 'a fox' -o out.gif # exit code 2
        ! aimage: unknown picture format: out.gif
        $ aimage replay pics/a-fox-1.png
        equal
    """,
}
