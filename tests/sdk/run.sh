#!/usr/bin/env bash
# Drives real clusters with the unmodified openai SDK:
#
#     cargo build --release && tests/sdk/run.sh target/release/baton
#
# Starts three (split over gRPC, split in memory, aggregated), checks the first with conformance.py and compares the
# token ids of all. The model is the default one, or BATON_MODEL. The SDK goes into a venv at $SDK_VENV.
set -euo pipefail

baton=${1:?usage: tests/sdk/run.sh path/to/baton}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
venv=${SDK_VENV:-$work/venv}
clusters=()

finish() {
    if ((${#clusters[@]})); then
        kill "${clusters[@]}" 2>/dev/null || true
        wait "${clusters[@]}" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap finish EXIT

# Starts a cluster on a free port; its URL is in $url afterwards.
start() {
    local name=$1
    shift
    "$baton" up --listen 127.0.0.1:0 --kv-memory-mb 256 --skip-self-check "$@" >"$work/$name.out" 2>"$work/$name.err" &
    clusters+=($!)
    for _ in $(seq 300); do
        url=$(sed -n 's|^ *gateway *\(http://[^ ]*\).*|\1/v1|p' "$work/$name.out")
        [[ -n $url ]] && return
        kill -0 "${clusters[-1]}" 2>/dev/null || break
        sleep 0.2
    done
    echo "the cluster '$name' did not start:" >&2
    cat "$work/$name.err" >&2
    exit 1
}

[[ -x $venv/bin/python ]] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"

urls=()
start grpc --prefill 2 --decode 2 --threads 1 --force-grpc-transfer && urls+=("$url")
start memory --prefill 1 --decode 1 --threads 1 && urls+=("$url")
start aggregated --prefill 0 --decode 1 --threads 1 && urls+=("$url")

"$venv/bin/python" "$here/conformance.py" --base-url "${urls[0]}"
"$venv/bin/python" "$here/conformance.py" --compare "${urls[@]}"
