// The part of NCCL's device API that is called, on the simulated network. Signals only add, as
// NCCL's do.
#pragma once

#include "tests/network/fake/device_code.h"
#include "tests/network/simulated.h"

namespace cuda {
enum memory_order { memory_order_relaxed, memory_order_acquire };
enum thread_scope {
    thread_scope_system,
    thread_scope_device,
    thread_scope_block,
    thread_scope_thread
};
}  // namespace cuda

struct ncclWindow {
    simulated::u64 begin;  // in the heap of every rank
};
using ncclWindow_t = ncclWindow*;
using ncclGinCounter_t = unsigned;

struct ncclDevComm {
    unsigned ginContextCount;
};
struct ncclTeam {};
inline ncclTeam ncclTeamWorld(const ncclDevComm&) { return {}; }

struct ncclCoopThread {};
struct ncclGin_None {};
struct ncclGin_WeakCounterInc {
    ncclGinCounter_t counter;
};
struct ncclGin_WeakVASignalAdd {
    ncclWindow_t window;
    size_t offset;
    uint64_t value;
};

class ncclGin {
  public:
    ncclGin(const ncclDevComm&, int context) : context_(context) {}

    void put(ncclTeam, int peer, ncclWindow_t to_window, size_t to, ncclWindow_t from_window,
             size_t from, size_t bytes, const ncclGin_WeakVASignalAdd& signal,
             ncclGin_WeakCounterInc, ncclCoopThread, ncclGin_None, cuda::thread_scope,
             cuda::thread_scope) const {
        simulated::Transfer t = added(peer, signal);
        t.to = heap(peer) + to_window->begin + to;
        t.from = heap(own()) + from_window->begin + from;
        t.bytes = bytes;
        t.read_count = &simulated::place->counters[context_];
        simulated::place->nic->begin(t);
    }
    void signal(ncclTeam, int peer, const ncclGin_WeakVASignalAdd& signal, ncclCoopThread,
                ncclGin_None, cuda::thread_scope, cuda::thread_scope) const {
        simulated::place->nic->begin(added(peer, signal));
    }
    void putValue(ncclTeam, int peer, ncclWindow_t window, size_t offset, uint64_t value) const {
        simulated::Transfer t;
        t.word = word(peer, window, offset);
        t.value = value;
        simulated::place->nic->begin(t);
    }
    uint64_t readSignal(ncclWindow_t window, size_t offset, int, cuda::memory_order order) const {
        const simulated::u64* const p = word(own(), window, offset);
        return order == cuda::memory_order_acquire ? simulated::HostTarget::load_acquire(p)
                                                   : simulated::HostTarget::load_relaxed(p);
    }
    uint64_t readCounter(ncclGinCounter_t, int bits) const {
        return simulated::HostTarget::load_acquire(&simulated::place->counters[context_]) &
               ~uint64_t{0} >> (64 - bits);
    }

  private:
    static int own() { return static_cast<int>(simulated::place->rank); }
    static simulated::u8* heap(int rank) {
        return simulated::place->heaps[static_cast<std::size_t>(rank)];
    }
    static simulated::u64* word(int rank, ncclWindow_t window, size_t offset) {
        return reinterpret_cast<simulated::u64*>(heap(rank) + window->begin + offset);
    }
    static simulated::Transfer added(int peer, const ncclGin_WeakVASignalAdd& signal) {
        simulated::Transfer t;
        t.word = word(peer, signal.window, signal.offset);
        t.value = signal.value;
        t.add = true;
        return t;
    }

    int context_;
};
