# Sourced by the other scripts: goes to the repository's root and makes .venv there, with the package installed.
# EXTRAS names the extras to install, such as "test,parity". Installs anew only when pyproject.toml has changed.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
  local name found=""
  for name in python3 python3.13 python3.12 python3.11; do
    if is_supported "$name"; then
      echo "$name"
      return
    fi
    found+="${found:+, }$name: $("$name" --version 2>/dev/null || echo none)"
  done
  echo "error: Python 3.11, 3.12 or 3.13 is needed; found $found. Install one of them and run this again." >&2
  return 1
}

# What an installation depends on. The path is a part: an editable installation points to where the checkout was.
fingerprint() {
  .venv/bin/python -c '
import hashlib, os, pathlib
print(hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes() + os.getcwd().encode()).hexdigest())'
}

set_up() {
  local extras="${EXTRAS:-}" python wanted
  local stamp=".venv/installed-${extras:-base}"
  if ! is_supported .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "Making .venv with $("$python" --version)" >&2
    "$python" -m venv --clear .venv
  fi
  wanted="$(fingerprint)"
  if [[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]]; then
    echo "Installing the package${extras:+ with $extras}; this takes minutes the first time" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
    echo "$wanted" >"$stamp"
  fi
}

set_up
