#!/usr/bin/env bash
# Makes this checkout's environment of requirements/lock.txt, or of requirements/NAME.txt where a NAME is given, outside the checkout,
# and prints its path last.
# The packages of a lock file are installed once. Each checkout has a small environment over them, which adds its code: what another
# checkout makes meanwhile changes nothing for this one's processes and their children. A half-made one has no stamp and is made again.
#   SPECSTORE_ENV_ROOT  where environments live (default: specstore/env under the user's cache directory)
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
root=${SPECSTORE_ENV_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/specstore/env}
lock=$checkout/requirements/${1:-lock}.txt
python=3.11
packages=$root/$python-$(sha256sum "$lock" | cut -c1-12)
env=$packages/checkouts/$(printf %s "$checkout" | sha256sum | cut -c1-12)
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
  python3 -m pip --version >/dev/null 2>&1 || { say "this machine lacks uv, and Python's pip to install it: apt-get install python3-pip"; exit 1; }
  rm -rf "$root/tools.new"
  # --target: works with a Python of the distribution and changes nothing in it.
  python3 -m pip install --quiet --target "$root/tools.new" uv >&2
  rm -rf "$root/tools"
  mv "$root/tools.new" "$root/tools"
}

install_lock() {
  say "installing $(grep -c == "$lock") packages into $packages (several GiB, minutes the first time)"
  rm -rf "$packages"
  "$uv" venv --quiet --python "$python" "$packages" >&2
  # --no-deps: nothing is resolved, so nothing that the lock leaves out is installed.
  # --compile-bytecode: a server's three processes import most of it, and without bytecode its start takes twice as long.
  "$uv" pip install --python "$packages/bin/python" --no-deps --only-binary :all: --compile-bytecode -r "$lock" >&2
}

install_project() {
  say "making the environment of $checkout over these packages"
  rm -f "$stamp"
  "$uv" venv --quiet --allow-existing --python "$packages/bin/python" "$env" >&2
  local site=lib/python$python/site-packages
  mkdir -p "$env/$site"
  echo "import site; site.addsitedir('$packages/$site')" >"$env/$site/packages.pth"
  take_programs
  "$uv" pip install --quiet --python "$env/bin/python" --no-deps --reinstall -e "$checkout" >&2
}

# A script names the interpreter that runs it, which must be this environment's.
take_programs() {
  local program name
  for program in "$packages"/bin/*; do
    name=${program##*/}
    case $name in python* | activate* | specstore | '*') continue ;; esac
    if [ "$(head -c 2 "$program" | tr -d '\0')" = '#!' ]; then
      sed "1,3s|$packages/bin/|$env/bin/|" "$program" >"$env/bin/$name"
      chmod +x "$env/bin/$name"
    else
      ln -sf "$program" "$env/bin/$name"
    fi
  done
}

mkdir -p "$root"
exec 9>"$root/.lock"
flock 9 # of two makes at once the second waits and finds the environment made
if [ "$(cat "$stamp" 2>/dev/null)" != "$project" ]; then
  find_uv
  [ -s "$packages/.lock-installed" ] || { install_lock && echo "$python" >"$packages/.lock-installed"; }
  install_project
  echo "$project" >"$stamp.new"
  mv "$stamp.new" "$stamp"
fi
echo "$env"
