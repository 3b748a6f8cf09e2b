#!/bin/sh
# Run aimage with the keys of the fleet in docker-compose.yml, and give gateways and workers theirs.
set -eu
umask 077
aimage "$@"
keys="$XDG_CONFIG_HOME/aimage/fleet/aimage"
cp "$keys/gateway.seed" "$keys/root.public" /run/aimage-gateway/
cp "$keys/root.public" /run/aimage-worker/
