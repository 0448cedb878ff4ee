#!/bin/bash
# prepare FOLDER [SHA256 NAME]: runs on a node as root, by `drumline aws launch`. Makes the folder; with a hash, installs
# the wheel of this name on stdin, if it has that hash. Exit code 65: it could not be installed.
set -u
install -d -o 1000 -g 1000 -- "$1" || exit 1
loginctl enable-linger "$(id -nu 1000)" || true # a detached job starts again after a reboot
[ $# -gt 1 ] || exit 0
if [ $# -ne 3 ]; then
  echo "this launch is of another version of drumline than the cluster; drumline aws down, then up" >&2
  exit 65
fi
installed=/opt/drumline/installed-sha256
[ "$(cat $installed 2> /dev/null)" != "$2" ] || exit 0
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
cat > "$folder/$3"
if ! echo "$2  $folder/$3" | sha256sum --check --status; then
  echo "the wheel that arrived does not have the SHA-256 $2" >&2
  exit 65
fi
exec 9> /opt/drumline/install-lock
flock 9 || exit 1
[ "$(cat $installed 2> /dev/null)" != "$2" ] || exit 0 # another launch has installed it meanwhile
rm -f $installed
/opt/drumline/bin/pip -q install --no-index --no-deps --force-reinstall "$folder/$3" >&2 || exit 65
echo "$2" > $installed
