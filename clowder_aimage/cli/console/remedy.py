"""Advice on errors: the commands that resolve them (``AImageError.remedy``)."""

from __future__ import annotations

from clowder_aimage.errors import AImageError

# code: sentence; {names} are facts of the error
REMEDIES = {
    "allow_host": "start the server with --allow-host {host}",
    "allow_input": "start the server with --allow-input {host}",
    "allow_origin": "start the server with --allow-origin {origin}",
    "attach_type": "for example: --type application/spdx+json",
    "base": "omit --base",
    "ca_file": "trust the CA of your organisation with --ca-file",
    "choose_digest": "choose one: aimage pull {name}@DIGEST",
    "choose_format": "choose one of them, for example --format {format}, or pass the file of one; "
    "or pack all files as they are, with --format files",
    "choose_manifest": "'aimage show' lists its manifests; 'aimage pull' with --variant or "
    "--platform selects one of them for the name",
    "choose_other_manifest": "choose one with --variant or --platform, or pull all: "
    "aimage pull {reference} --whole",
    "choose_platform": "choose one: aimage pull {reference} --platform OS/ARCH, or "
    "aimage pull {name}@DIGEST",
    "choose_schema": "choose one with --schema NAME: {names}",
    "choose_weights": "choose one with --variant NAME: {names}",
    "choose_variant": "choose one: aimage pull {reference} --variant NAME, or "
    "aimage pull {name}@DIGEST",
    "choose_variant_or_platform": "choose one: aimage pull {reference} --variant NAME, or "
    "aimage pull {reference} --platform OS/ARCH, or aimage pull {name}@DIGEST",
    "complete": "to complete it: aimage pull {reference}",
    "client_certificate": "present one with --cert-file and --key-file, or put it into "
    "certs.d/{registry}/ as client.cert and client.key",
    "compress_whole_files": "compress whole files, with --whole-files or another format",
    "convert_schema_1": "convert it with a newer tool, for example: skopeo copy --format oci",
    "copy_from_store": "to push it from the store: aimage tag {source} {target} "
    "&& aimage push {target}",
    "copy_to_store": "to pull it into the store: aimage pull {source} "
    "&& aimage tag {source} {target}",
    "delete_manifest": "to delete the manifest with all its tags: aimage delete {name}@{digest}",
    "create_from_hub": "to pack it: aimage create NAME hf://{model}",
    "diff_remote": "omit --remote, or use a name with a registry host",
    "docker_archive": "convert an archive of 'docker save': "
    "skopeo copy docker-archive:FILE oci-archive:NEW:NAME",
    "export_model": "to write a model, omit --as",
    "use_torch": "select it with --backend torch, or omit --compile, --attention, --compute and "
    "--device",
    "pack_path": "to pack a model: aimage create NAME {path}",
    "other_device": "PyTorch sees {devices}: name one with --device, or omit it; a GPU needs its "
    "driver, and a build of PyTorch for CUDA or ROCm",
    "use_adapter": "use it with a model: aimage run MODEL --lora {reference}",
    "use_controlnet": "use it with a model: aimage run MODEL PROMPT --controlnet {reference} "
    "--control FILE",
    "export_files": "to get its files: aimage export {reference} DIR",
    "export_room": "free some space, export to another disk, or use --links if the store is on "
    "the same disk",
    "export_to_run": "export it and run it with {library}: aimage export {reference} DIR",
    "export_to_pack": "export it, and pack the directory: aimage export {reference} DIR "
    "&& aimage create NAME DIR",
    "fewer_jobs": "compute fewer tensors at a time: --jobs 1",
    "file_permissions": "check the permissions of the file and of its directories",
    "fleet_key": "'aimage fleet init' prints it: give it with --fleet-key, or in AIMAGE_FLEET_KEY",
    "fleet_init": "prepare it with: aimage fleet init --fleet {fleet}",
    "https": "the registry may expect HTTPS: omit --plain-http; for a loopback host, use --ca-file "
    'or --insecure, or "plainHttp": false in the configuration',
    "install_extra": "{command}",
    "layer_of_other_type": "use --layer for other media types only",
    "layout_as_store": "use an image layout in a directory with --store",
    "license_check": "'aimage trust check REF' explains the policy, whose owner can add the "
    "licence to its list 'allow'",
    "like": "a complete {family} model in the store can complete it: aimage create NAME {path} "
    "--like REF; or pack the file as it is with --format safetensors",
    "like_tokenizer": "put its files (tokenizer.json, tokenizer_config.json and a chat template) "
    "into {path}/tokenizer, or take them from a complete {family} model in the store: "
    "aimage create NAME {path} --like REF",
    "like_unknown": "name a complete model in the store with --like REF, or pack the file as it is "
    "with --format safetensors",
    "list_attached": "'aimage referrers' lists the artifacts that are attached to a name",
    "listen_elsewhere": "choose another address with --addr",
    "listen_without_tokens": "listen on 127.0.0.1, require a token with --token-file, or allow "
    "this with --allow-remote",
    "known_list": "give an archive of 'aimage save', or a list: ls STORE/blobs/sha256",
    "load_as": "set a name: aimage load FILE --as NAME",
    "load_decompressed": "decompress it first: {tool} -dc FILE | aimage load -",
    "load_without_as": "omit --as, and set other names with 'aimage tag'",
    "login": "log in with: aimage login {registry}",
    "logout": "remove them with: aimage logout {registry}, or renew them with: "
    "aimage login {registry}",
    "login_of_worker": "log in as the user that runs the worker: aimage login HOST",
    "lower_case_or_hub": "use lower case: {name}; to pack a model of the Hugging Face hub: "
    "aimage create NAME {model}",
    "name_adapter": "set a name with --adapter NAME=PATH",
    "name_store": "name a directory with --store or AIMAGE_STORE, or set HOME",
    "name_docker_config": "name a file with REGISTRY_AUTH_FILE, or a directory with DOCKER_CONFIG",
    "name_enhancer": "name one with --enhancer REF or AIMAGE_ENHANCER; that of Z-Image can be used "
    "too: aimage create enhancer --enhancer --from REF",
    "no_layers": "omit --component and --include to pull all of it",
    "no_variant": "omit --variant",
    "model_of_worker": "use {used}, or pull yours: aimage pull --remote {name}",
    "no_worker": "start one with 'aimage serve', or set AIMAGE_HOST to another",
    "not_in_store": "'aimage ls' lists the names in the store",
    "not_in_store_pull": "'aimage ls' lists the names in the store; 'aimage pull' fetches from a "
    "registry",
    "not_an_aimage": "it can be pulled, pushed and listed, but not run or rewritten; "
    "'aimage attach --get' writes the files of an attachment",
    "nothing_to_convert": "give --quantize, --dtype or both",
    "other_store": "to change that store: aimage --store {root} {verb} {reference}",
    "list_keys": "look at it, and repeat the change: aimage fleet key list",
    "pickle_beside_model": "{other}; leave it out with --format {format}; or pack all files as "
    "they are, with --whole-files",
    "plain_http": "the registry may expect HTTP: use --plain-http",
    "pull_index": "to pull all of it: aimage pull {reference} --whole",
    "pull_whole": "to pull all of them: aimage pull --whole {reference}",
    "push_dialect": "omit --no-fallback, or push with --dialect container",
    "push_by_tag": "the registry may refuse this type of manifest, which a push by digest does not "
    "rewrite: aimage tag {reference} {name}:TAG && aimage push {name}:TAG",
    "denied_manifest": "the account may lack permission, or the registry refuses this type of "
    "manifest: then push with --dialect container",
    "sign": "its signer attaches one with 'aimage sign'",
    "sign_files": "pull it first, or sign its manifest without --as oms",
    "trust_check": "'aimage trust check REF' explains the policy; its publisher signs it with "
    "'aimage sign'",
    "trust_policy": "'aimage validate' checks it; see docs/trust.md",
    "unclear_refusal": "the registry may refuse this type of manifest: push with "
    "--dialect container",
    "replace_keys": "name the right root key with --root-key, or replace the key set with "
    "'aimage fleet init --replace-keys': then all workers need the new --fleet-key",
    "rederive": "'aimage convert' and 'aimage create --from' write one, which is pushed with the "
    "AImage",
    "repair": "repair the store first: aimage verify --repair",
    "repair_or_remove": "fetch it with 'aimage verify --repair', or: aimage rm {reference}",
    "repair_store": "if the copy in the store is damaged: aimage verify --repair",
    "adapter_file": "pull or create it, or name its file with --lora",
    "nats_server": "start the NATS server, or name another one with --nats or AIMAGE_NATS",
    "require_tokens": "start the server with --token-file",
    "root_key": "name its file with --root-key; 'aimage fleet init' makes one for a new fleet",
    "add_signing_key": "whoever has the root key adds it: aimage fleet key add NAME --role {role} "
    "--public {public}",
    "signing_key": "name its file with --signing-key, or in AIMAGE_SIGNING_KEY; whoever has the "
    "root key makes one: aimage fleet key add NAME --role {role} --output FILE",
    "rotate_key": "to replace it: aimage fleet key rotate {name}",
    "single_writer": "if this host alone writes it, set AIMAGE_STORE_SINGLE_WRITER=true, or "
    "store.single_writer to true in the configuration; reading needs neither",
    "store_calls": "'aimage df' shows what the file system of the store lacks",
    "store_directory": "choose a directory with --store",
    "store_permissions": "check the permissions of the directory, or choose another with --store",
    "tag_host": "use a name with a host, such as registry.example.com/{reference}; "
    "'aimage tag' adds one to a name in the store",
    "trust_realm": "if that host may receive the credentials of {registry}: "
    "export AIMAGE_TRUSTED_REALMS={realms}",
    "use_encoder": "the text encoder of Z-Image or FLUX.2 [klein] can be used as one: "
    "aimage create NAME --enhancer --from {model}",
    "validate_names": "to list all its faults: aimage validate --schema names {file}",
    "whole_files": "{other}; or pack all files as they are, with --whole-files",
    "whole_weights": "name a model whose last layer is whole with --weights: a directory or an "
    "AImage of Qwen3-4B, or an AImage of FLUX.2 [klein] 4B",
    "worker_address": "set AIMAGE_HOST to the address of a worker; 'aimage serve --addr HOST:PORT' "
    "starts one",
    "worker_token": "set AIMAGE_TOKEN to a token in the worker's token file",
    "write_modelpack": "other tools also read --dialect modelpack",
}


def format_advice(error: AImageError) -> str | None:
    """Return the advice for ``error``: its remedy, else its hint, else None."""
    if error.remedy:
        facts = dict(error.facts)
        if error.remedy == "install_extra":
            from clowder_aimage.cli.console.installation import install_command

            facts["command"] = install_command(facts["extra"])
        return REMEDIES[error.remedy].format_map(facts)
    return error.hint
