#!/usr/bin/env bash
# Builds planner and host kernel with the sanitizers and runs the driver on each; then a build with a
# relaxed release, in which ThreadSanitizer must report a race.
set -euo pipefail
cd "$(dirname "$0")/../.."
CXX=${CXX:-g++}
SECONDS_EACH=${SANITIZE_SECONDS:-20}
out=build/sanitize
mkdir -p "$out"
sources=(
    tests/sanitize/driver.cc planner/core/*.cc
    kernels/entry/host_cluster.cc kernels/entry/host_launch.cc kernels/entry/host_rank.cc
)
flags=(-std=c++17 -g -O1 -I. -pthread -Wall -Wextra -Werror)

build() { # name, extra flags
    local name=$1
    shift
    echo "building $name"
    "$CXX" "${flags[@]}" "$@" "${sources[@]}" -o "$out/$name" -lrt
}

# ThreadSanitizer of older compilers cannot place its shadow under high address space randomisation.
calm() {
    if setarch "$(uname -m)" -R true 2>/dev/null; then
        setarch "$(uname -m)" -R "$@"
    else
        "$@"
    fi
}

build thread -fsanitize=thread &
first=$!
build address -fsanitize=address,undefined -fno-sanitize-recover=all
wait "$first"
build relaxed -fsanitize=thread -DFASTKERN_FAULT_RELAXED_RELEASE

echo "ThreadSanitizer"
TSAN_OPTIONS="halt_on_error=1 exitcode=66" calm "$out/thread" "$SECONDS_EACH" 1
echo "AddressSanitizer and UndefinedBehaviorSanitizer"
ASAN_OPTIONS="detect_stack_use_after_return=1" "$out/address" "$SECONDS_EACH" 2

echo "negative control: a relaxed release must be reported"
status=0
TSAN_OPTIONS="halt_on_error=1 exitcode=66" calm "$out/relaxed" "$SECONDS_EACH" 1 \
    >"$out/relaxed.log" 2>&1 || status=$?
if [ "$status" -ne 66 ] || ! grep -q "data race" "$out/relaxed.log"; then
    echo "ThreadSanitizer did not report the race of the relaxed build (exit code $status)"
    exit 1
fi
echo "reported: $(grep -m1 'WARNING: ThreadSanitizer' "$out/relaxed.log")"
echo "sanitizers passed"
