#!/bin/sh
# Before the worker of docker-compose.yml: a token for it, and a model in the registry to ask it for.
set -eu

if [ ! -s "$TOKEN_FILE" ]; then
  umask 077
  python -c 'import secrets; print(secrets.token_hex(32))' > "$TOKEN_FILE.new"
  mv "$TOKEN_FILE.new" "$TOKEN_FILE"
fi
aimage create --quiet "$MODEL" "$MODEL_DIRECTORY"
aimage push "$MODEL"
