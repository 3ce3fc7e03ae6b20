#!/usr/bin/env bash
# Runs the tests, on a machine with nothing but Python 3.11 to 3.13.
#   bash scripts/test.sh                               the whole suite
#   bash scripts/test.sh tests/test_model.py -k chunk  what pytest is given; paths are from the repository's root
#   EXTRAS=test,parity bash scripts/test.sh            with the live comparison with PyTorch
set -euo pipefail
export EXTRAS="${EXTRAS:-test}"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

workers="$(.venv/bin/python -c 'import os; print(min(4, os.cpu_count() or 1))')"
# A file stays in one worker, so that its tests share what they compile.
exec .venv/bin/python -m pytest -n "$workers" --dist loadfile "$@"
