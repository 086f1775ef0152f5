#include "tests/sanitize/entry.h"

#include <chrono>
#include <deque>
#include <thread>

#include "kernels/entry/host_heap.h"
#include "kernels/entry/host_threads.h"
//
#include "kernels/body/static.h"
#include "kernels/transport/shuffled.h"

namespace fastkern {

namespace {

constexpr u32 kEntries = 12;
constexpr u64 kDeadlineNs = 20'000'000'000;

// Of each rank: whose puts are late.
std::deque<ShuffledQueue>* late = nullptr;

template <class Target>
struct LateTransport : ShuffledTransport<Target> {
    LateTransport(const Target& target, const KernelArgs& args)
        : ShuffledTransport<Target>(target, args, &(*late)[args.rank]) {}
};

// What a rank counts for a key in an entry.
u64 count_of(u32 rank, u32 entry, u64 key) { return rank * 1000 + entry * 100000 + key + 1; }

struct Ranks {
    Topology topology;
    LaunchOptions options;
    u32 num_experts;
    u32 bad_rank, bad_entry;  // whose topk_idx is bad, once
    HeapView heap;
    u32 first_slot;
    u64 record_bytes;
    std::vector<u8> table;  // a header

    u64 keys() const { return u64{num_experts} + topology.servers + topology.num_ranks(); }

    std::string run(u32 rank, const std::vector<u32>& delays_us) {
        const u32 r = topology.num_ranks();
        std::vector<u64> totals(keys()), bad(2), counts(r * keys() + 1), outcome(6), entries(1);
        HandleHeader handle{};
        MoeArgs moe{};
        for (u32 entry = 1; entry <= kEntries; ++entry) {
            std::this_thread::sleep_for(std::chrono::microseconds(delays_us[entry - 1]));
            for (u64 key = 0; key < keys(); ++key) totals[key] = count_of(rank, entry, key);
            const bool spoiled = entry == bad_entry;
            bad[1] = spoiled && rank == bad_rank ? 7 : ~u64{0};
            KernelArgs call{};
            call.table = table.data();
            call.controls = heap.controls.data();
            call.flags = heap.flags.data();
            call.data = heap.data.data();
            call.epoch = entry;
            call.rank = rank;
            call.num_blocks = 1;
            StaticArgs fixed{};
            fixed.moe = &moe;
            fixed.call = &call;
            fixed.record_bytes = record_bytes;
            fixed.entries = entries.data();
            fixed.outcome = outcome.data();
            fixed.counts = counts.data();
            fixed.entry_ns = kDeadlineNs;
            fixed.first_slot = first_slot;
            StaticLaunch launch{};
            launch.ranks = &fixed;
            launch.brings_values = 1;
            RouteArgs& route = launch.values.route;
            route.totals = totals.data();
            route.bad = bad.data();
            route.handle = reinterpret_cast<u8*>(&handle);
            route.num_tokens = entry;
            route.num_units = 1;
            route.num_experts = num_experts;
            route.num_ranks = r;
            route.servers = topology.servers;
            route.gpus_per_server = topology.gpus_per_server;
            route.rank = rank;
            run_blocks(1, options.num_lanes, options.teams, [&](const auto& target) {
                if (options.transport == HostTransport::kShuffled)
                    prepare_dispatch<LateTransport, false>(target, launch);
                else
                    prepare_dispatch<MappedTransport, false>(target, launch);
            });
            const std::string where =
                "rank " + std::to_string(rank) + ", entry " + std::to_string(entry);
            if (heap.controls[rank]->abort) return where + ": gave up";
            // What the dispatch that follows would do before it ends.
            HostBlock block;
            const HostTarget target(&block, 0, 0);
            const LateTransport<HostTarget> transport(target, call);
            while (!transport.quiet()) {
            }
            for (u32 from = 0; from < r; ++from)
                for (u64 key = 0; key < keys(); ++key)
                    if (counts[from * keys() + key] != (spoiled ? 0 : count_of(from, entry, key)))
                        return where + ": wrong count of rank " + std::to_string(from);
            if (counts.back() != (spoiled ? 0 : entry)) return where + ": wrong tokens";
            if (outcome[0] != spoiled || outcome[1] != (entry >= bad_entry))
                return where + ": wrong verdict";
            if (entry >= bad_entry && (outcome[2] != bad_rank || outcome[3] != 7))
                return where + ": does not say which index is bad";
        }
        return {};
    }
};

}  // namespace

std::string run_entries(Random& random, const Topology& topology, const LaunchOptions& options) {
    const u32 r = topology.num_ranks(), n = topology.servers;
    Ranks ranks{};
    ranks.topology = topology;
    ranks.options = options;
    ranks.num_experts = 1 + static_cast<u32>(random() % 20);
    ranks.bad_rank = static_cast<u32>(random() % r);
    ranks.bad_entry = 1 + static_cast<u32>(random() % (kEntries + 2));
    ranks.record_bytes = (8 * (ranks.keys() + 1) + 15) / 16 * 16;
    Header header{};
    header.num_ranks = r;
    header.servers = n;
    header.gpus_per_server = topology.gpus_per_server;
    header.chunk_slots = 2;
    ranks.table.resize(sizeof header + kNumQueues * sizeof(Queue));
    std::memcpy(ranks.table.data(), &header, sizeof header);
    const FlagLayout flags{r, n, topology.gpus_per_server, header.chunk_slots};
    ranks.first_slot = flags.num_slots();
    const ControlLayout layout{r, ranks.first_slot + n + r, 8};
    std::vector<u64> control(layout.bytes() * r / 8, 0);
    const u64 data_bytes = 2 * r * ranks.record_bytes;
    std::vector<u64> data(data_bytes * r / 8, 0);
    ranks.heap.map_control(reinterpret_cast<u8*>(control.data()), layout);
    ranks.heap.map_data(reinterpret_cast<u8*>(data.data()), data_bytes);
    std::deque<ShuffledQueue> queues;
    for (u32 rank = 0; rank < r; ++rank) queues.emplace_back(random());
    late = &queues;
    std::vector<std::string> errors(r);
    std::vector<std::vector<u32>> delays(r);
    for (auto& mine : delays)
        for (u32 k = 0; k < kEntries; ++k)
            mine.push_back(random() % 4 ? 0 : static_cast<u32>(random() % 300));
    std::vector<std::thread> threads;
    for (u32 rank = 0; rank < r; ++rank)
        threads.emplace_back([&, rank] { errors[rank] = ranks.run(rank, delays[rank]); });
    for (std::thread& t : threads) t.join();
    for (const std::string& error : errors)
        if (!error.empty()) return error;
    return {};
}

}  // namespace fastkern
