#!/bin/sh
# Run a program as a container of docker-compose.yml would: no capability, no way to get one, and all
# file systems read-only but the directories named:  unshare --mount sh caged.sh DIRECTORY... -- PROGRAM...
# The last of them is a tmpfs that runs nothing, as /tmp is there. Exit code 77: this cannot be done here.
{
  mount --make-rprivate /
  before=$(cut -d ' ' -f 2 /proc/self/mounts)
  while [ "$2" != -- ]; do
    mount --bind "$1" "$1" || exit 77
    shift
  done
  mount -t tmpfs -o size=256m,noexec,nosuid,nodev tmpfs "$1" || exit 77
  shift 2
  mount -o remount,bind,ro / || exit 77
  for place in $before; do
    case $place in /|/proc*|/sys*|/dev*) ;; *) mount -o remount,bind,ro "$place" 2>/dev/null ;; esac
  done
} >&2
exec setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all --no-new-privs "$@"
