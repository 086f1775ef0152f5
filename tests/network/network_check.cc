// The network transports on the simulated network: ranks are threads, their control words and data
// are mapped inside a server only. For tests/network/test_network.py, as a shared library.
#define FASTKERN_ROCSHMEM_HEADER "tests/network/fake/rocshmem.h"
#include "kernels/entry/host_threads.h"
#include "tests/network/simulated.h"
//
#include "kernels/body/exchange.h"
#include "kernels/transport/nccl_gin.h"
#include "kernels/transport/nvshmem.h"
#include "kernels/transport/rocshmem.h"

namespace {

using namespace fastkern;

constexpr u32 kContexts = 3;

enum Kind : u32 { kNvshmem, kGin, kRocshmem };

template <template <class> class Transport>
void run_lane(const HostTarget& target, const KernelArgs& args) {
    exchange_block<AllToAll>(target, Transport<HostTarget>(target, args), args);
}

}  // namespace

extern "C" {

struct NetworkRun {
    u32 kind;
    u32 num_ranks;
    u32 num_calls;
    u32 num_blocks;
    u32 num_lanes;
    u32 delay_us;  // of every transfer; 0: random, up to 30
    u64 seed;
    const u8* const* tables;  // [num_calls][num_ranks]
    const u8* const* inputs;  // likewise
    u8* const* outputs;       // likewise
    const u64* progress_ns;   // [num_ranks]
    const u32* absent;        // [num_ranks] 1: this rank makes no call
    u64* epochs;              // [num_ranks] calls that it completed
    u64* aborts;              // [num_ranks] its abort word
};

// False where the tables are not of the version that this was compiled for.
bool run_network(const NetworkRun* run) {
    const u32 num_ranks = run->num_ranks;
    const Header& first = *view_table(run->tables[0]).header;
    if (first.magic != kTableMagic || first.version != kTableVersion) return false;
    const u32 num_local = first.gpus_per_server;
    const FlagLayout layout{num_ranks, first.servers, num_local, first.chunk_slots};
    u64 data_bytes = 0;
    for (u32 k = 0; k < run->num_calls * num_ranks; ++k) {
        const u64 bytes = data_layout(*view_table(run->tables[k]).header).bytes;
        data_bytes = bytes > data_bytes ? bytes : data_bytes;
    }
    const u64 flags_at = round_up_256(sizeof(Control));
    const u64 data_at = flags_at + round_up_256(layout.num_slots() * u64{8});
    const u64 words = (data_at + data_bytes) / 8 + 1;
    std::vector<std::vector<u64>> heaps(num_ranks, std::vector<u64>(words, 0));
    std::vector<u8*> bases;
    for (auto& heap : heaps) bases.push_back(reinterpret_cast<u8*>(heap.data()));

    std::vector<std::unique_ptr<simulated::Nic>> nics;
    for (u32 r = 0; r < num_ranks; ++r)
        nics.push_back(std::make_unique<simulated::Nic>(run->seed * 1000 + r, run->delay_us));
    const auto run_rank = [&](u32 rank) {
        std::vector<Control*> controls(num_ranks, nullptr);
        std::vector<u64*> flags(num_ranks, nullptr);
        std::vector<u8*> data(num_ranks, nullptr);
        std::vector<u32> peers;
        for (u32 r = 0; r < num_ranks; ++r) {
            peers.push_back(r);
            if (r / num_local != rank / num_local) continue;
            controls[r] = reinterpret_cast<Control*>(bases[r]);
            flags[r] = reinterpret_cast<u64*>(bases[r] + flags_at);
            data[r] = bases[r] + data_at;
        }
        std::vector<u64> written(num_ranks * u64{2 + first.chunk_slots}, 0);
        std::vector<u64> puts(kContexts, 0), counters(kContexts, 0);
        const ncclDevComm comm{kContexts};
        simulated::Place place{bases, nics[rank].get(), rank, counters.data()};
        ncclWindow control_window{0}, data_window{data_at};
        NetworkArgs network{};
        network.peers = peers.data();
        network.heap = bases[rank];
        network.comm = reinterpret_cast<const u8*>(&comm);
        network.window = reinterpret_cast<u8*>(&control_window);
        network.data_window = reinterpret_cast<u8*>(&data_window);
        network.written = written.data();
        network.puts = puts.data();
        for (u32 k = 0; k < run->num_calls; ++k) {
            const u32 at = k * num_ranks + rank;
            KernelArgs args{};
            args.table = run->tables[at];
            args.input = run->inputs[at];
            args.output = run->outputs[at];
            args.controls = controls.data();
            args.flags = flags.data();
            args.data = data.data();
            args.network = reinterpret_cast<const u8*>(&network);
            args.progress_ns = run->progress_ns[rank];
            args.num_blocks = run->num_blocks;
            args.rank = rank;
            run_blocks(run->num_blocks, run->num_lanes, [&](const HostTarget& target) {
                simulated::place = &place;
                simulated::lane = &target;
                if (run->kind == kNvshmem)
                    run_lane<NvshmemTransport>(target, args);
                else if (run->kind == kGin)
                    run_lane<GinTransport>(target, args);
                else
                    run_lane<RocshmemTransport>(target, args);
            });
            if (controls[rank]->epoch != k + 1) break;
        }
        while (!nics[rank]->idle()) std::this_thread::yield();
        run->epochs[rank] = controls[rank]->epoch;
    };
    std::vector<std::thread> ranks;
    for (u32 r = 0; r < num_ranks; ++r)
        if (!run->absent[r]) ranks.emplace_back(run_rank, r);
    for (std::thread& t : ranks) t.join();
    nics.clear();
    for (u32 r = 0; r < num_ranks; ++r)
        run->aborts[r] = reinterpret_cast<const Control*>(bases[r])->abort;
    return true;
}

}  // extern "C"
