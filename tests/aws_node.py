"""What a node of `drumline aws` finds when it runs its user data in a test: programs that stand in
for apt, systemd, pip and the mount. They note in FOLDER/log how they were called; the report to the
stack goes to FOLDER/report. A file no-volume or no-index lets that step fail, and locked lets apt's
first update fail."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAMS = {
    "apt-get": """
echo "apt-get $@" >> {folder}/log
case "$*" in *update) [ ! -e {folder}/locked ] || { rm {folder}/locked; exit 100; } ;; esac""",
    "systemctl": 'echo "systemctl $@" >> {folder}/log',
    "loginctl": 'echo "loginctl $@" >> {folder}/log',
    "mount": "[ -e {folder}/no-volume ] || exec /bin/mount --bind {shared} /mnt/shared",
    "sudo": 'exec "$@"',
    "sleep": "true",
    "pip": """
echo "pip $@" >> {folder}/log
case "$*" in *--no-index*) exec {pip} "$@" --target /opt/drumline/site ;; esac
[ ! -e {folder}/no-index ]""",
    "curl": """
case "$*" in
  *-T*) echo "curl $@" >> {folder}/log; cp /run/drumline-report {folder}/report ;;
  *) {metadata} ;;
esac""",
    # A venv: its pip fails where there is a file no-index, its Python where there is a file
    # no-boto3. Wheels are installed by a real pip.
    "python3": """
mkdir -p /opt/drumline/bin
cp {folder}/bin/pip /opt/drumline/bin/pip
printf '#!/bin/sh\\n[ ! -e {folder}/no-boto3 ] && {python}\\n' > /opt/drumline/bin/python
chmod 755 /opt/drumline/bin/*""",
}


def write_programs(folder: Path, *, shared: Path, metadata: str, python: str) -> str:
    """The PATH of the node. `metadata` answers curl, `python` is what the venv's Python runs."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        pip = f"{sys.executable} -m pip --disable-pip-version-check"
        given = {
            "folder": folder,
            "shared": shared,
            "metadata": metadata,
            "python": python,
            "pip": pip,
        }
        for key, value in given.items():
            text = text.replace(f"{{{key}}}", str(value))
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    return f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin"
