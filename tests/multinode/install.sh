#!/bin/sh
# Gets the tools that tests/multinode needs (see needs.py) from apt where it may; quiet and quick when all are there.
# It never fails: where a tool stays missing, the tests are skipped and say so.
set -u
PATH=$PATH:/usr/sbin:/sbin

missing=
for pair in ip:iproute2 tc:iproute2 nft:nftables sshd:openssh-server ssh:openssh-client ssh-keygen:openssh-client \
    rsync:rsync nsenter:util-linux unshare:util-linux setpriv:util-linux; do
    command -v "${pair%%:*}" >/dev/null || case " $missing " in
        *" ${pair#*:} "*) ;;
        *) missing="$missing ${pair#*:}" ;;
    esac
done
[ -z "$missing" ] && exit 0

skip() {
    echo "tests/multinode will be skipped: $1 (missing:$missing)"
    exit 0
}
[ "$(id -u)" = 0 ] || skip "not root"
command -v apt-get >/dev/null || skip "no apt-get here"
case "$missing" in *openssh-server*)
    # On a machine with a service manager the package would open port 22 to the world, now and at each start.
    [ -d /run/systemd/system ] && skip "openssh-server would start a service; install it yourself if you want that"
esac

install() {
    # shellcheck disable=SC2086  # one word per package
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $missing >"$log" 2>&1
}
log=$(mktemp)
echo "tests/multinode: installing$missing"
# The package lists may be old or absent, but mostly they are good, and getting them takes longer than the rest.
install || { apt-get update --quiet >/dev/null 2>&1 && install; } || { tail -n 3 "$log"; rm -f "$log"; skip "apt-get failed"; }
rm -f "$log"
