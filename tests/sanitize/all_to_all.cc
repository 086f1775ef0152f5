#include "tests/sanitize/all_to_all.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/entry/host_cluster.h"
#include "kernels/entry/host_rank.h"

namespace fastkern {

namespace {

struct Call {
    std::vector<i64> traffic;
    std::vector<Vector<u8>> tables;
    std::vector<std::vector<u8>> inputs, outputs;
};

u8 byte_of(u32 src, u64 row, u64 column, u32 call) {
    return static_cast<u8>(src * 131 + row * 31 + column * 7 + call * 17 + 1);
}

Call make_call(std::mt19937_64& random, const Topology& topology, u64 row_bytes, u32 index) {
    const u32 r = topology.num_ranks();
    Call call;
    call.traffic.resize(std::size_t{r} * r);
    const u64 most = random() % 3 == 0 ? 2 : 12;
    for (i64& rows : call.traffic) rows = random() % 3 == 0 ? 0 : static_cast<i64>(random() % most);
    if (random() % 4 == 0) call.traffic[random() % call.traffic.size()] = 60;
    Options options;
    options.chunk_bytes = row_bytes * (1 + random() % 8);
    options.credit_lead = static_cast<u32>(random() % 3);
    const Plan plan = make_plan(call.traffic.data(), topology, row_bytes,
                                static_cast<PolicyChoice>(random() % 5), options);
    for (const std::string& fault : validate(plan)) {
        std::printf("%s\n", fault.c_str());
        std::exit(1);
    }
    for (u32 s = 0; s < r; ++s) {
        call.tables.push_back(lower(plan, s));
        u64 rows_in = 0, rows_out = 0;
        for (u32 d = 0; d < r; ++d) {
            rows_in += static_cast<u64>(call.traffic[s * r + d]);
            rows_out += static_cast<u64>(call.traffic[d * r + s]);
        }
        std::vector<u8> input(rows_in * row_bytes);
        for (u64 k = 0; k < input.size(); ++k)
            input[k] = byte_of(s, k / row_bytes, k % row_bytes, index);
        call.inputs.push_back(std::move(input));
        call.outputs.emplace_back(rows_out * row_bytes, u8{0xEE});
    }
    return call;
}

bool right(const Call& call, u32 num_ranks, u64 row_bytes, u32 index) {
    for (u32 d = 0; d < num_ranks; ++d) {
        u64 at = 0;
        for (u32 s = 0; s < num_ranks; ++s) {
            u64 row = 0;
            for (u32 k = 0; k < d; ++k) row += static_cast<u64>(call.traffic[s * num_ranks + k]);
            const u64 rows = static_cast<u64>(call.traffic[s * num_ranks + d]);
            for (u64 k = 0; k < rows * row_bytes; ++k, ++at)
                if (call.outputs[d][at] != byte_of(s, row + k / row_bytes, k % row_bytes, index))
                    return false;
        }
    }
    return true;
}

// The runtime's side: ranks as threads enter each call with a record, check all records, launch.
std::string run_ranks(std::vector<Call>& calls, const Topology& topology,
                      const LaunchOptions& options) {
    const u32 r = topology.num_ranks();
    u64 data_bytes = 0;
    for (const Call& call : calls)
        for (const auto& table : call.tables)
            data_bytes = std::max(data_bytes, data_layout(*view_table(table.data()).header).bytes);
    const FlagLayout flags{r, topology.servers, topology.gpus_per_server, Options{}.chunk_slots};
    const ControlLayout layout{r, flags.num_slots(), 16};
    std::vector<u64> control(layout.bytes() * r / 8, 0);
    std::vector<u8> data(data_bytes * r);
    std::vector<std::string> errors(r);
    std::vector<std::thread> threads;
    for (u32 rank = 0; rank < r; ++rank)
        threads.emplace_back([&, rank] {
            HostRank host(rank, layout, reinterpret_cast<u8*>(control.data()));
            host.map_data(data.data(), data_bytes);
            for (u64 epoch = 1; epoch <= calls.size(); ++epoch) {
                Call& call = calls[epoch - 1];
                const u64 record[2] = {epoch * 1000 + rank, ~epoch};
                host.post_record(epoch, reinterpret_cast<const u8*>(record), sizeof record);
                if (host.await_records(epoch, 60'000'000'000ull) != Outcome::kDone)
                    errors[rank] = "records did not come";
                for (u32 k = 0; k < r; ++k) {
                    u64 seen[2];
                    std::memcpy(seen, host.record(epoch, k), sizeof seen);
                    if (seen[0] != epoch * 1000 + k || seen[1] != ~epoch)
                        errors[rank] = "a record of another call was read";
                }
                if (!host.launch(call.tables[rank].data(), call.inputs[rank].data(),
                                 call.outputs[rank].data(), nullptr, epoch, 60'000'000'000ull,
                                 options))
                    errors[rank] = "the call was aborted";
            }
        });
    for (std::thread& t : threads) t.join();
    for (const std::string& error : errors)
        if (!error.empty()) return error;
    return {};
}

}  // namespace

std::string run_all_to_alls(std::mt19937_64& random, const Topology& topology,
                            const LaunchOptions& options) {
    const u64 row_bytes = 1 + random() % 70;
    std::vector<Call> calls;
    for (u32 k = 0; k < 3; ++k) calls.push_back(make_call(random, topology, row_bytes, k));
    std::vector<ClusterCall> views;
    for (Call& call : calls) {
        ClusterCall view;
        for (u32 r = 0; r < topology.num_ranks(); ++r) {
            view.tables.push_back(call.tables[r].data());
            view.inputs.push_back(call.inputs[r].data());
            view.outputs.push_back(call.outputs[r].data());
            view.delay_us.push_back(random() % 5 == 0 ? 2000 : 0);
        }
        views.push_back(view);
    }
    const std::string error = random() % 2 ? run_cluster(views, options, 60'000'000'000ull)
                                           : run_ranks(calls, topology, options);
    if (!error.empty()) return error;
    for (u32 k = 0; k < calls.size(); ++k)
        if (!right(calls[k], topology.num_ranks(), row_bytes, k))
            return "call " + std::to_string(k) + " delivered wrong rows";
    return {};
}

}  // namespace fastkern
