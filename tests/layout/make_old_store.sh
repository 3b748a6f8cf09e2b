#!/bin/sh
# make_old_store.sh DIRECTORY: write store-0.1.tar.gz there with the installed version of aimage.
# tests/layout/test_old_store.py reads the archive that version 0.1 wrote.
set -e
cd $1
python - <<'E2'
import json, struct, pathlib
root = pathlib.Path("small"); root.mkdir()
(root / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], "model_type": "tiny"}))
header, data = {}, b""
for name, shape in (("embed.weight", [64, 64]), ("norm.weight", [64])):
    size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + size]}
    data += b"".join(struct.pack("<f", (i % 13) / 8 - 0.75) for i in range(size // 4))
text = json.dumps(header).encode(); text += b" " * (-len(text) % 8)
(root / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
E2
export AIMAGE_STORE=$PWD/store HOME=$PWD XDG_CONFIG_HOME=$PWD/c
aimage create -q registry.example/team/small:v1 small
aimage create -q small:container small --dialect container
aimage tag -q registry.example/team/small:v1 small:latest
aimage pin small:latest

tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -czf store-0.1.tar.gz store
