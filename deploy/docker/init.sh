#!/bin/sh
# Create the token file of docker-compose.yml, with a line "admin TOKEN", and push the model to the registry.
set -eu

if [ ! -s "$TOKEN_FILE" ]; then
  umask 077
  python -c 'import secrets; print("admin", secrets.token_hex(32))' > "$TOKEN_FILE.new"
  mv "$TOKEN_FILE.new" "$TOKEN_FILE"
fi
aimage create --quiet "$MODEL" "$MODEL_DIRECTORY"
aimage push "$MODEL"
