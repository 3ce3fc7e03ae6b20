#!/usr/bin/env bash
# Chats with the checkpoint that ships, on a machine with nothing but Python 3.11 to 3.13.
#   bash scripts/demo.sh                        a few prompts that show what it can do
#   bash scripts/demo.sh "your own prompt" ...  yours instead
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

prompts=("$@")
if [[ $# == 0 ]]; then
  prompts=(
    "What does the \`with\` statement do?"
    "How do I read a file in Python?"
    $'Repeat the string below exactly.\n\nqX7-blue_harbor/42;zeta kappa_19 -> rho'
  )
fi

for prompt in "${prompts[@]}"; do
  printf '\n'
  sed 's/^/> /' <<<"$prompt"
  .venv/bin/qwen38 generate --chat="$prompt" --no-thinking --temperature 0 --max-new-tokens 256
done
