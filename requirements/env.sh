#!/usr/bin/env bash
# Makes the environment of requirements/lock.txt, or of requirements/NAME.txt where a NAME is given, outside the checkout, and
# prints its path last.
# There is one environment per lock file. A half-made one has no stamp and is made again.
#   SPECSTORE_ENV_ROOT  where environments live (default: specstore/env under the user's cache directory)
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
root=${SPECSTORE_ENV_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/specstore/env}
lock=$checkout/requirements/${1:-lock}.txt
python=3.11
env=$root/$python-$(sha256sum "$lock" | cut -c1-12)
stamp=$env/.complete # written last; names what the environment holds
project="$checkout $(sha256sum "$checkout/pyproject.toml" | cut -c1-12)"

say() { echo "env: $*" >&2; }

find_uv() {
  if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
    uv=uv
  else
    uv=$root/tools/bin/uv
    [ -x "$uv" ] || install_uv
  fi
}

install_uv() {
  say "installing uv with pip into $root/tools"
  python3 -m pip --version >/dev/null || { say "needs uv, or Python's pip to install it (Debian: python3-pip)"; exit 1; }
  rm -rf "$root/tools.new"
  # --target: works with a Python of the distribution and changes nothing in it.
  python3 -m pip install --quiet --target "$root/tools.new" uv >&2
  rm -rf "$root/tools"
  mv "$root/tools.new" "$root/tools"
}

install_lock() {
  say "installing $(grep -c == "$lock") packages into $env (several GiB, minutes the first time)"
  rm -rf "$env"
  "$uv" venv --quiet --python "$python" "$env" >&2
  # --no-deps: nothing is resolved, so nothing that the lock leaves out is installed.
  # --compile-bytecode: a server's three processes import most of it, and without bytecode its start takes twice as long.
  "$uv" pip install --python "$env/bin/python" --no-deps --only-binary :all: --compile-bytecode -r "$lock" >&2
}

install_project() {
  say "pointing the environment at $checkout"
  rm -f "$stamp"
  "$uv" pip install --quiet --python "$env/bin/python" --no-deps --reinstall -e "$checkout" >&2
}

mkdir -p "$root"
exec 9>"$root/.lock"
flock 9 # of two makes at once the second waits and finds the environment made
if [ "$(cat "$stamp" 2>/dev/null)" != "$project" ]; then
  find_uv
  [ -s "$env/.lock-installed" ] || { install_lock && echo "$python" >"$env/.lock-installed"; }
  install_project
  echo "$project" >"$stamp.new"
  mv "$stamp.new" "$stamp"
fi
echo "$env"
