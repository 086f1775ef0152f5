// Blocks as groups of threads: what every launch on the host target starts with.
#pragma once

#include <atomic>
#include <deque>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/target/host_team.h"

namespace fastkern {

// Runs body(target) for every lane of every block, on a thread each (the caller's for the first),
// and returns when all are over. They begin together, or not at all where a thread cannot be made:
// then the error is thrown.
template <class Body>
void run_blocks(u32 num_blocks, u32 num_lanes, const Body& body) {
    enum class Start { kWait, kGo, kCancel };
    std::deque<HostBlock> blocks(num_blocks);
    for (HostBlock& block : blocks) block.num_lanes = num_lanes;
    std::atomic<Start> start{Start::kWait};
    std::vector<std::thread> threads;
    try {
        for (u32 b = 0; b < num_blocks; ++b)
            for (u32 l = 0; l < num_lanes; ++l)
                if (b || l)
                    threads.emplace_back([&, b, l] {
                        Start word;
                        while ((word = start.load(std::memory_order_acquire)) == Start::kWait)
                            std::this_thread::yield();
                        if (word == Start::kGo) body(HostTarget(&blocks[b], b, l));
                    });
    } catch (...) {
        start.store(Start::kCancel, std::memory_order_release);
        for (std::thread& t : threads) t.join();
        throw;
    }
    start.store(Start::kGo, std::memory_order_release);
    body(HostTarget(&blocks[0], 0, 0));
    for (std::thread& t : threads) t.join();
}

// The same, `teams`: with teams of several lanes. body takes any target.
template <class Body>
void run_blocks(u32 num_blocks, u32 num_lanes, bool teams, const Body& body) {
    if (!teams) return run_blocks(num_blocks, num_lanes, body);
    constexpr u32 kTeam = HostTeamTarget::kTeam, kMost = HostTeamTarget::kMostTeams;
    if (num_lanes % kTeam || num_lanes > kTeam * kMost)
        throw std::invalid_argument("blocks must be 1 to 16 whole teams");
    std::vector<HostTeam> all(u64{num_blocks} * kMost);
    run_blocks(num_blocks, num_lanes, [&](const HostTarget& lane) {
        body(HostTeamTarget(lane, all.data() + u64{lane.block()} * kMost));
    });
}

}  // namespace fastkern
