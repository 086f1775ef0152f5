#include "kernels/entry/host_cluster.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "kernels/entry/host_heap.h"

namespace fastkern {

namespace {

constexpr u64 kGuardBytes = 256;
constexpr u8 kGuard = 0xC5;

}  // namespace

std::string run_cluster(const std::vector<ClusterCall>& calls, const LaunchOptions& options,
                        u64 progress_ns) {
    const Header& first = *view_table(calls.at(0).tables.at(0)).header;
    const u32 num_ranks = first.num_ranks;
    u64 data_bytes = 0;
    for (const ClusterCall& call : calls)
        for (const u8* table : call.tables)
            data_bytes = std::max(data_bytes, data_layout(*view_table(table).header).bytes);
    const FlagLayout flags{num_ranks, first.servers, first.gpus_per_server, first.chunk_slots};
    const ControlLayout layout{num_ranks, flags.num_slots(), 8};
    const u64 stride = data_bytes + 2 * kGuardBytes;
    std::vector<u64> control((layout.bytes() * num_ranks) / 8, 0);
    std::vector<u8> data(stride * num_ranks, 0xAA);
    HeapView heap;
    heap.map_control(reinterpret_cast<u8*>(control.data()), layout);
    heap.map_data(data.data() + kGuardBytes, stride);
    for (u32 r = 0; r < num_ranks; ++r) {
        std::memset(heap.data[r] - kGuardBytes, kGuard, kGuardBytes);
        std::memset(heap.data[r] + data_bytes, kGuard, kGuardBytes);
    }
    std::vector<std::string> errors(num_ranks);
    std::vector<std::thread> ranks;
    for (u32 r = 0; r < num_ranks; ++r)
        ranks.emplace_back([&, r] {
            for (std::size_t e = 0; e < calls.size(); ++e) {
                if (!calls[e].delay_us.empty() && calls[e].delay_us[r])
                    std::this_thread::sleep_for(std::chrono::microseconds(calls[e].delay_us[r]));
                KernelArgs args{};
                args.table = calls[e].tables[r];
                args.input = calls[e].inputs[r];
                args.output = calls[e].outputs[r];
                args.controls = heap.controls.data();
                args.flags = heap.flags.data();
                args.visible_ns = heap.visible_ns.data();
                args.data = heap.data.data();
                args.epoch = e + 1;
                args.progress_ns = progress_ns;
                args.rank = r;
                if (launch_on_host(args, options)) continue;
                const Control& c = *heap.controls[r];
                errors[r] =
                    "rank " + std::to_string(r) + " call " + std::to_string(e + 1) + " aborted";
                if (c.record.state == kRecordWritten)
                    errors[r] += ": queue " + std::to_string(c.record.queue) + " stage " +
                                 std::to_string(c.record.stage) + " chunk " +
                                 std::to_string(c.record.chunk) + " waits for flag " +
                                 std::to_string(c.record.slot) + " of rank " +
                                 std::to_string(c.record.peer) + ", expected " +
                                 std::to_string(c.record.expected) + ", seen " +
                                 std::to_string(c.record.seen);
                return;
            }
        });
    for (std::thread& t : ranks) t.join();
    for (u32 r = 0; r < num_ranks; ++r)
        if (heap.controls[r]->abort != heap.controls[0]->abort)
            return "rank " + std::to_string(r) + " and rank 0 name different origins of the abort";
    for (const std::string& error : errors)
        if (error.find(':') != std::string::npos) return error;
    for (const std::string& error : errors)
        if (!error.empty()) return error;
    for (u32 r = 0; r < num_ranks; ++r)
        for (u64 k = 0; k < kGuardBytes; ++k)
            if (heap.data[r][-static_cast<std::ptrdiff_t>(k) - 1] != kGuard ||
                heap.data[r][data_bytes + k] != kGuard)
                return "rank " + std::to_string(r) + ": bytes around its heap were overwritten";
    return {};
}

}  // namespace fastkern
