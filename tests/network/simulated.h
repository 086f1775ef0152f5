// A network between ranks that are threads of one process, for transports to run on. Every rank has
// a NIC: a thread that carries out what the rank has begun, late and in random order (with a set
// delay in order, one after the other). A transfer moves its bytes, then changes its word; between
// two of them nothing is ordered.
//
// The libraries in fake/ are thin covers of it: symmetric memory is a heap of equal layout on every
// rank, and a PE is a rank.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "kernels/target/host.h"

namespace simulated {

using fastkern::HostTarget;
using fastkern::u32;
using fastkern::u64;
using fastkern::u8;

struct Transfer {
    u8* to = nullptr;
    const u8* from = nullptr;
    u64 bytes = 0;
    u64* word = nullptr;
    u64 value = 0;
    bool add = false;           // to the word, instead of setting it
    u64* read_count = nullptr;  // here: counts up once `from` has been read
};

class Nic {
  public:
    Nic(u64 seed, u32 delay_us) : random_(seed), delay_us_(delay_us), thread_([this] { run(); }) {}
    ~Nic() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_one();
        thread_.join();
    }

    void begin(const Transfer& transfer) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            pending_.push_back(transfer);
            ++unfinished_;
        }
        wake_.notify_one();
    }
    bool idle() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return unfinished_ == 0;
    }

  private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return stop_ || !pending_.empty(); });
            if (pending_.empty()) return;
            const std::size_t k = delay_us_ ? 0 : random_() % pending_.size();
            const Transfer t = pending_[k];
            pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(k));
            const u64 wait_us = delay_us_ ? delay_us_ : random_() % 30;
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(wait_us));
            deliver(t);
            lock.lock();
            --unfinished_;
        }
    }
    static void deliver(const Transfer& t) {
        if (t.bytes) std::memcpy(t.to, t.from, t.bytes);
        if (t.read_count) HostTarget::fetch_add(t.read_count, 1);
        if (t.add)
            HostTarget::fetch_add(t.word, t.value);
        else if (t.word)
            HostTarget::store_release(t.word, t.value);
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::mt19937_64 random_;
    std::vector<Transfer> pending_;
    u64 unfinished_ = 0;
    const u32 delay_us_;
    bool stop_ = false;
    std::thread thread_;
};

// What the libraries know of the rank that a thread runs for.
struct Place {
    std::vector<u8*> heaps;  // of all ranks
    Nic* nic = nullptr;
    u32 rank = 0;
    u64* counters = nullptr;  // [contexts]
};

inline thread_local const Place* place = nullptr;
inline thread_local const HostTarget* lane = nullptr;

// The same object on another rank.
template <class T>
T* on(u32 rank, T* p) {
    const u64 offset = reinterpret_cast<u64>(p) - reinterpret_cast<u64>(place->heaps[place->rank]);
    return reinterpret_cast<T*>(place->heaps[rank] + offset);
}

}  // namespace simulated
