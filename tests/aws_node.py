"""What a node of `drumline aws` finds when it runs its user data in a test: programs that stand in for apt, systemd,
pip and the mount. They note in FOLDER/log how they were called; the report to the stack goes to FOLDER/report."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = {
    "apt-get": 'echo "apt-get $@" >> {folder}/log',
    "systemctl": 'echo "systemctl $@" >> {folder}/log',
    "mount": "[ -e {folder}/no-volume ] || exec /bin/mount --bind {shared} /mnt/shared",
    "sudo": 'exec "$@"',
    "sleep": "true",
    "curl": """
case "$*" in
  *-T*) echo "curl $@" >> {folder}/log; cp /run/drumline-report {folder}/report ;;
  *) {metadata} ;;
esac""",
    # A venv: its pip fails where there is a file no-index, its Python where there is a file no-boto3.
    "python3": """
mkdir -p /opt/drumline/bin
printf '#!/bin/sh\\necho "pip $@" >> {folder}/log\\n[ ! -e {folder}/no-index ]\\n' > /opt/drumline/bin/pip
printf '#!/bin/sh\\n[ ! -e {folder}/no-boto3 ] && {python}\\n' > /opt/drumline/bin/python
chmod 755 /opt/drumline/bin/*""",
}


def write_programs(folder: Path, *, shared: Path, metadata: str, python: str) -> str:
    """The PATH of the node. `metadata` answers curl, `python` is what the venv's Python runs."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        given = {"folder": folder, "shared": shared, "metadata": metadata, "python": python}
        for key, value in given.items():
            text = text.replace(f"{{{key}}}", str(value))
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    return f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin"
