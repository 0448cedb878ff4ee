#!/bin/sh
# Gets the tools that tests/multinode needs (see needs.py), and the browser of tests/cli/test_report_browser.py, from apt
# where it may; quiet and quick when all are there.
# It never fails: where a tool stays missing, the tests are skipped and say so.
set -u
PATH=$PATH:/usr/sbin:/sbin

lacking() {
    found=
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || case " $found " in
            *" ${pair#*:} "*) ;;
            *) found="$found ${pair#*:}" ;;
        esac
    done
    echo "$found"
}
for_hosts=$(lacking ip:iproute2 tc:iproute2 nft:nftables sshd:openssh-server ssh:openssh-client \
    ssh-keygen:openssh-client rsync:rsync nsenter:util-linux unshare:util-linux setpriv:util-linux \
    cc:build-essential)
for_slurm=$(lacking munged:munge slurmctld:slurm-wlm slurmd:slurm-wlm sbatch:slurm-wlm scontrol:slurm-wlm)

skip() {
    echo "${3:-tests/multinode} will be skipped: $1 (missing:$2)"
}
install() {
    log=$(mktemp)
    echo "tests: installing$1"
    # The package lists may be old or absent, but mostly they are good, and getting them takes longer than the rest.
    get "$1" || { apt-get update --quiet >/dev/null 2>&1 && get "$1"; } || { tail -n 3 "$log"; false; }
    code=$?
    rm -f "$log"
    return $code
}
get() {
    # shellcheck disable=SC2086  # one word per package
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $1 >"$log" 2>&1
}
# $1: packages; $2: those among them that open ports on a machine with a service manager, now and at each start; $3: which tests
ensure() {
    [ -z "$1" ] && return
    [ "$(id -u)" = 0 ] || { skip "not root" "$1" "${3:-}"; return; }
    command -v apt-get >/dev/null || { skip "no apt-get here" "$1" "${3:-}"; return; }
    for package in $2; do
        case " $1 " in *" $package "*)
            [ -d /run/systemd/system ] && {
                skip "$package would start a service; install it yourself if you want that" "$1" "${3:-}"
                return
            } ;;
        esac
    done
    install "$1" || skip "apt-get failed" "$1" "${3:-}"
}
ensure "$for_hosts" openssh-server
ensure "$for_slurm" "munge slurm-wlm" "tests/multinode's Slurm tests"
ensure "$(lacking stunnel4:stunnel4)" stunnel4 "the test of the tunnel to a volume"
ensure "$(lacking promtool:prometheus)" prometheus "the tests of /metrics with Prometheus"
ensure "$(lacking chromium:chromium)" "" tests/cli/test_report_browser.py
exit 0
