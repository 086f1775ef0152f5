#!/usr/bin/env bash
# Builds, checks and measures on one GPU, offline, with the Python packages that are there; under 4
# minutes. Without a GPU, --dry runs the same steps on the CPU, small.
#
#   perf/gpu_check.sh [--target auto|cuda|hip] [--dry] [--python PYTHON] [--out FILE]
#                     [--scratch FOLDER] [--build-only]
#
# Every step is a process of its own with its own time limit, and what it finds stays whatever
# happens to the others. The last thing printed is a short table; the JSON file beside it holds all
# of it (perf/README.md). Exit code 1 where anything was not right.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
total=230 slack=1 # seconds, with the report; of every step's limit
target=auto python=${PYTHON:-python3} dry="" build_only="" out="" scratch=$root/build/gpu

usage() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit "$1"
}

while (($#)); do
    case $1 in
        --dry) dry=1 ;;
        --build-only) build_only=1 ;;
        --target | --python | --out | --scratch)
            (($# > 1)) || usage 2 >&2
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        --help) usage 0 ;;
        *) usage 2 >&2 ;;
    esac
    shift
done
case $target in auto | cuda | hip) ;; *) usage 2 >&2 ;; esac
[[ $dry ]] && target=host total=1500 slack=6 # whatever else the CPU has to do
given=$python
python=$(command -v "$given") && python=$(realpath -s "$python") || {
    echo "no Python called $given" >&2
    exit 2
}
mkdir -p "$scratch/run" && scratch=$(cd "$scratch" && pwd) || exit 2
out=$(realpath -m "${out:-$root/build/gpu_check.json}")
site=$scratch/site
rm -rf "$scratch/run/found"
mkdir -p "$scratch/run/found"
found=$scratch/run/found
export FASTKERN_CACHE_DIR=$scratch/kernels # compiled once for all steps
export PYTHONUNBUFFERED=1

# Python starts outside of the repository: there, the folder fastkern/ hides what was built.
cd "$scratch/run" || exit 2
failed_early=""

# note NAME CODE SECONDS LIMIT: for the report; the code is "-" where the step has not run.
note() { printf '%s\t%s\t%s\t%s\n' "$@" >>"$found/steps.tsv"; }

# within SECONDS: a step's limit, cut to what is left of the whole.
within() {
    local limit=$(($1 * slack)) left=$((total - SECONDS - 15))
    echo $((limit < left ? limit : left))
}

# step NAME LIMIT COMMAND...
step() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    if [[ $failed_early || $limit -lt 5 ]]; then
        note "$name" - 0 "$limit"
        return 1
    fi
    echo "== $name, at most $limit s"
    timeout -k 5 "$limit" "$@" >"$found/$name.log" 2>&1
    code=$?
    note "$name" "$code" $((SECONDS - start)) "$limit"
    ((code == 0)) || tail -n 25 "$found/$name.log"
    return "$code"
}

# check NAME SECONDS MODULE [ARGUMENT...]: a step of perf/gpu. It is told to begin nothing more some
# seconds before it would be cut.
check() {
    local name=$1 limit module=$3
    limit=$(within "$2")
    shift 3
    step "$name" "$limit" "$python" -m "perf.gpu.$module" --target "$target" \
        --out "$found/$name.json" --seconds $((limit * 4 / 5)) "$@"
}

# Installed in place from this checkout: what a developer's .venv holds.
in_place() {
    [[ $("$python" -c 'import fastkern, fastkern.kernels._host; print(fastkern.__file__)') \
        == "$root/fastkern/__init__.py" ]]
} 2>/dev/null

if in_place; then
    note build 0 0 0
    echo '{"cases": [], "measures": [], "facts": {"detail": "in place, as make setup left it"}}' \
        >"$found/build.json"
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
else
    rm -rf "$site"
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) step build "$(within 90)" "$python" -m pip install -q \
        --disable-pip-version-check --no-index --no-build-isolation --no-deps \
        --target "$site" -C build-dir="$scratch/cmake" \
        -C cmake.define.FASTKERN_WERROR=OFF "$root" || # whatever compiler that is
        failed_early=1
    export PYTHONPATH=$site:$root${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ $build_only ]]; then
    [[ $failed_early ]] && exit 1
    exit 0
fi

step detect "$(within 60)" "$python" -m perf.gpu.detect --target "$target" \
    --target-file "$found/target" --out "$found/detect.json"
# With the kernels in Triton; in a dry run by its interpreter, which holds one rank.
check_triton() { TRITON_INTERPRET=$([[ $dry ]] && echo 1 || echo 0) check "$@"; }

# Where a device is there, the rest runs even if a kernel does not compile.
if [[ -e $found/target ]]; then target=$(<"$found/target"); else failed_early=1; fi
check all_to_all 30 grid --group all_to_all
check moe 30 grid --group moe
check static 25 grid --group static
check replays 20 grid --group replays
check deadlines 25 grid --group deadlines
check measure 45 measure
check_triton triton_compile 50 triton_images
if (($? == 77)); then # there is no Triton here, as its findings say
    note triton - 0 35
    note triton_measure - 0 35
else
    check_triton triton 35 grid --kernels triton --most "$([[ $dry ]] && echo 2 || echo 10)" \
        --group all_to_all moe static replays deadlines
    check_triton triton_measure 35 compare
fi
check sanitize 40 sanitize

"$python" -m perf.gpu.report --folder "$found" --out "$out" --seconds $SECONDS ${dry:+--dry}
