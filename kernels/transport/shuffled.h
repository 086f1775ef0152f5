// Shuffled `shm`, for tests: puts land late and out of order, and blocks stall at random.
//
// A put is only noted; `progress` delivers noted puts one at a time in random order, bytes first,
// flag after, as a network that orders nothing but a put and its own flag would. Everything else
// passes through.
#pragma once

#include <mutex>
#include <random>
#include <vector>

#include "kernels/transport/mapped.h"

namespace fastkern {

// Shared by the blocks of one rank, lives for one launch.
class ShuffledQueue {
  public:
    explicit ShuffledQueue(u64 seed) : random_(seed) {}

    struct Pending {
        u8* to;
        const u8* from;
        u64 bytes;
        u64* flag;
        u64 stamp;
    };

    void add(const Pending& p) {
        const std::lock_guard<std::mutex> lock(mutex_);
        pending_.push_back(p);
    }
    template <class Target>
    void deliver_one(const Target& target, bool certainly) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (pending_.empty() || (!certainly && random_() % 2 == 0)) return;
        const std::size_t k = random_() % pending_.size();
        const Pending p = pending_[k];
        pending_[k] = pending_.back();
        pending_.pop_back();
        if (p.bytes) std::memcpy(p.to, p.from, p.bytes);
        target.store_release(p.flag, p.stamp);
    }
    bool empty() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return pending_.empty();
    }
    // A stall of up to 200 us, now and then.
    u32 stall_us() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return random_() % 64 == 0 ? static_cast<u32>(random_() % 200) : 0;
    }

  private:
    std::mutex mutex_;
    std::mt19937_64 random_;
    std::vector<Pending> pending_;
};

template <class Target>
class ShuffledTransport : public MappedTransport<Target> {
    using Base = MappedTransport<Target>;

  public:
    ShuffledTransport(const Target& target, const KernelArgs& args, ShuffledQueue* queue)
        : Base(target, args), target_(target), args_(args), queue_(queue) {}

    void put(u64 to, u64 from, u64 bytes, u32 rank, u32 slot) const {
        if (target_.lane() == 0)
            queue_->add({args_.data[rank] + to, args_.data[args_.rank] + from, bytes,
                         &args_.flags[rank][slot], Base::stamp(1)});
    }
    void signal(u32 rank, u32 slot, u32 value, Tier, u64) const {
        queue_->add({nullptr, nullptr, 0, &args_.flags[rank][slot], Base::stamp(value)});
    }
    void progress() const {
        const u32 us = queue_->stall_us();
        if (us) {
            const timespec t{0, static_cast<long>(us) * 1000};
            nanosleep(&t, nullptr);
        }
        queue_->deliver_one(target_, false);
    }
    bool quiet() const {
        queue_->deliver_one(target_, true);
        return queue_->empty();
    }

  private:
    const Target& target_;
    const KernelArgs& args_;
    ShuffledQueue* queue_;
};

}  // namespace fastkern
