#!/usr/bin/env bash
# Builds planner and host kernel with the sanitizers and runs the driver on each; then builds with a
# fault each, in which ThreadSanitizer must report a race.
set -euo pipefail
cd "$(dirname "$0")/../.."
CXX=${CXX:-g++}
SECONDS_EACH=${SANITIZE_SECONDS:-20}
out=build/sanitize
rm -rf "$out"
tests=(tests/sanitize/*.cc)
planner=(planner/core/*.cc kernels/entry/host_{counts,planner}.cc)
kernels=(kernels/entry/host_{cluster,launch,rank,route}.cc)
flags=(-std=c++17 -g -O1 -pthread -Wall -Wextra -Werror -ffp-contract=off)

# Compiles sources of the tree `root` into $out/name, as many at a time as there are cores.
objects() { # name, root, sources... -- flags...
    local name=$1 root=$2 sources=()
    shift 2
    while [ "$1" != -- ]; do
        sources+=("$1")
        shift
    done
    shift
    mkdir -p "$out/$name"
    printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} sh -c \
        'o=$(basename "$1" .cc).o; shift; exec "$@" -o "'"$out/$name"'/$o"' \
        sh {} "$CXX" "${flags[@]}" "$@" "-I$root" -c "$root/{}"
}

link() { # program, flags..., objects
    local program=$1
    shift
    "$CXX" -pthread "$@" -o "$out/$program" -lrt
}

# ThreadSanitizer of older compilers cannot place its shadow under high address space randomisation.
calm() {
    if setarch "$(uname -m)" -R true 2>/dev/null; then
        setarch "$(uname -m)" -R "$@"
    else
        "$@"
    fi
}

tsan() { # program, seconds
    TSAN_OPTIONS="halt_on_error=1 exitcode=66" calm "$out/$1" "$2" 1
}

# A kernel with a fault, linked with the other objects of the thread build, must be reported.
control() { # name, what, root, flags...
    local name=$1 what=$2 root=$3 status=0
    shift 3
    echo "negative control: $what must be reported"
    objects "$name" "$root" "${kernels[@]}" -- -fsanitize=thread "$@"
    link "$name.driver" -fsanitize=thread "$out"/"$name"/*.o "$out"/thread_rest/*.o
    tsan "$name.driver" "$((SECONDS_EACH * 3))" >"$out/$name.log" 2>&1 || status=$?
    if [ "$status" -ne 66 ] || ! grep -q "data race" "$out/$name.log"; then
        echo "ThreadSanitizer did not report the race (exit code $status)"
        exit 1
    fi
    echo "reported: $(grep -m1 'WARNING: ThreadSanitizer' "$out/$name.log")"
}

# A copy of the sources with one line changed. The pattern must match once.
edited() { # name, file, pattern, replacement
    local root=$out/$1.src
    mkdir -p "$root"
    find planner kernels -name '*.h' -o -name 'host*.cc' | xargs cp --parents -t "$root"
    if [ "$(grep -c -- "$3" "$root/$2")" != 1 ]; then
        echo "$2: '$3' does not match once" >&2
        exit 1
    fi
    sed -i "s/$3/$4/" "$root/$2"
}

echo "building"
objects thread_rest . "${tests[@]}" "${planner[@]}" -- -fsanitize=thread
objects thread . "${kernels[@]}" -- -fsanitize=thread
link thread.driver -fsanitize=thread "$out"/thread/*.o "$out"/thread_rest/*.o
memory=(-fsanitize=address,undefined -fno-sanitize-recover=all)
objects address . "${tests[@]}" "${planner[@]}" "${kernels[@]}" -- "${memory[@]}"
link address.driver "${memory[@]}" "$out"/address/*.o

echo "ThreadSanitizer"
tsan thread.driver "$SECONDS_EACH"
echo "AddressSanitizer and UndefinedBehaviorSanitizer"
ASAN_OPTIONS="detect_stack_use_after_return=1" "$out/address.driver" "$SECONDS_EACH" 2

control relaxed "a relaxed release" . -DFASTKERN_FAULT_RELAXED_RELEASE
# Reduce waits for the tickets of land and take alone: whoever claimed them has seen the flags.
edited tickets kernels/body/items.h 'return call.target.load_acquire(&call.control' \
    'return call.target.load_relaxed(\&call.control'
control tickets "tickets read relaxed before a reduce" "$out/tickets.src"
echo "sanitizers passed"
