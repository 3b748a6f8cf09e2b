"""Advice on errors: the commands that resolve them (``AImageError.remedy``)."""

from __future__ import annotations

from clowder_aimage.errors import AImageError

# code: sentence; {names} are facts of the error
REMEDIES = {
    "attach_type": "write it as in --type application/spdx+json",
    "base": "leave --base out",
    "ca_file": "name your organisation's CA with --ca-file",
    "choose_digest": "choose one: aimage pull {name}@DIGEST",
    "choose_format": "choose one: --format {format}, or another of them",
    "choose_manifest": "'aimage show' lists what is in it; 'aimage pull' with --variant or "
    "--platform makes the name mean one of that",
    "choose_other_manifest": "choose one with --variant or --platform, or to have all of it: "
    "aimage pull {reference} --whole",
    "choose_platform": "choose one: aimage pull {reference} --platform OS/ARCH, or "
    "aimage pull {name}@DIGEST",
    "choose_schema": "--schema NAME says which document it should be: {names}",
    "choose_variant": "choose one: aimage pull {reference} --variant NAME, or "
    "aimage pull {name}@DIGEST",
    "choose_variant_or_platform": "choose one: aimage pull {reference} --variant NAME, or "
    "aimage pull {reference} --platform OS/ARCH, or aimage pull {name}@DIGEST",
    "complete": "to complete it: aimage pull {reference}",
    "compress_whole_files": "with --whole-files, or another format, files can be",
    "convert_schema_1": "push it again from a newer tool: skopeo copy --format oci",
    "copy_from_store": "to send it from the store: aimage tag {source} {target} "
    "&& aimage push {target}",
    "copy_to_store": "to have it in the store: aimage pull {source} "
    "&& aimage tag {source} {target}",
    "diff_remote": "leave --remote out, or give the name of what a registry holds",
    "docker_archive": "from docker: skopeo copy docker-archive:FILE oci-archive:NEW:NAME",
    "export_room": "free some space, export to another disk, or use --links where the store is on "
    "the same one",
    "export_to_pack": "aimage export {reference} DIR gives its files back; what is in a tar can be "
    "packed from there with aimage create",
    "install_extra": "pip install 'clowder-aimage[{extra}]'",
    "layer_of_other_type": "--layer is for other media types",
    "layout_as_store": "a layout in a directory is used with --store",
    "listen_elsewhere": "is another worker, or ollama, running? --addr names another address",
    "listen_without_tokens": "listen on 127.0.0.1, or name the tokens of those who may with "
    "--token-file",
    "load_as": "give it one: aimage load FILE --as NAME",
    "load_decompressed": "unpack it on the way: {tool} -dc FILE | aimage load -",
    "load_without_as": "load it without --as, and use 'aimage tag'",
    "login": "log in with: aimage login {registry}",
    "login_of_worker": "the user that the worker runs as logs in with: aimage login HOST",
    "name_adapter": "--adapter NAME=PATH names it",
    "no_layers": "leave --component and --include out to fetch all of it",
    "no_variant": "leave --variant out to have what is there",
    "no_worker": "start one with 'aimage serve', or name another one in AIMAGE_HOST",
    "not_in_store": "'aimage ls' lists what is there",
    "not_in_store_pull": "'aimage ls' lists what is there; 'aimage pull' fetches from a registry",
    "nothing_to_convert": "give --quantize, --dtype or both",
    "other_store": "to change that one: aimage --store {root} {verb} {reference}",
    "plain_http": "use --plain-http for a registry without TLS",
    "pull_index": "to have all of it: aimage pull {reference} --whole",
    "pull_whole": "to fetch all of them: aimage pull --whole {reference}",
    "push_dialect": "leave --no-fallback out, or push with --dialect container",
    "registry_without_token": "listen on 127.0.0.1, ask for a token with --token-file, or accept "
    "that with --allow-remote",
    "repair": "repair it first: aimage verify --repair",
    "repair_or_remove": "aimage verify --repair fetches it, or: aimage rm {reference}",
    "repair_store": "if it is the copy in the store that is damaged: aimage verify --repair",
    "store_directory": "name a directory with --store",
    "store_permissions": "check the directory's permissions, or name another one with --store",
    "tag_host": "give it a name with a host first: aimage tag {reference} "
    "registry.example.com/{reference}",
    "worker_address": "check that AIMAGE_HOST names a worker",
    "worker_token": "set AIMAGE_TOKEN to a token in the worker's token file",
    "write_modelpack": "--dialect modelpack is what other tools read, too",
}


def advice(error: AImageError) -> str | None:
    """Return the advice for ``error``: its remedy, else its hint, else None."""
    if error.remedy:
        return REMEDIES[error.remedy].format_map(error.facts)
    return error.hint
