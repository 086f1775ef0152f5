// How blocks claim items when others are faster (kernels/body/pick.h), on the host target.
//
// Usage: claims_check lost FILE      one block; others claim between its look and each of its swaps
//        claims_check threads FILE   many blocks of each rank, which hesitate before they swap
//
// FILE: for each rank its table, its input and the output that must come, each as a length in 8
// bytes and as many bytes, filled up to a multiple of 8. Prints counts; the first check that fails
// is printed and ends the program with 1.
#include <cstring>

#include "tests/claims_lost.h"

namespace {

// Blocks that hesitate before they swap, so that others claim meanwhile.
template <class Base>
class HesitantTarget : public Base {
  public:
    explicit HesitantTarget(const Base& base) : Base(base) {}
    u64 compare_and_swap(u64* p, u64 expected, u64 desired) const {
        for (u32 k = 0; k < 3; ++k) sched_yield();
        return Base::compare_and_swap(p, expected, desired);
    }
};

using CountsOfQueues = std::array<std::vector<u64>, kNumQueues>;
std::vector<CountsOfQueues>* times_run;  // [R]: of each item, how often it has run

struct Counted {
    static constexpr bool kMoe = false;
    template <class Call>
    static void run(const Call& call, const RunningItem<Call>& item) {
        if (call.target.lane() == 0) {
            CHECK(can_run(call, item.item, nullptr));
            u64* const times = &(*times_run)[call.args().rank][item.queue()][item.item.ticket];
            CHECK(HostTarget::fetch_add(times, 1) == 0);
        }
        AllToAll::run(call, item);
    }
};

void run_threads(const std::vector<RankFiles>& ranks, u32 num_blocks, u32 num_lanes, bool teams) {
    Heap heap(ranks);
    std::vector<Bytes> outputs;
    std::vector<CountsOfQueues> times(ranks.size());
    times_run = &times;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
        outputs.emplace_back(ranks[r].output.size(), u8{0xEE});
        for (u32 q = 0; q < kNumQueues; ++q)
            times[r][q].resize(view_table(ranks[r].table.data()).queues[q].num_items);
    }
    std::vector<std::thread> threads;
    for (u32 r = 0; r < ranks.size(); ++r)
        threads.emplace_back([&, r] {
            KernelArgs args = heap.args_of(ranks[r], r, outputs[r].data());
            args.num_blocks = num_blocks;
            run_blocks(num_blocks, num_lanes, teams, [&](const auto& target) {
                const HesitantTarget hesitant(target);
                const MappedTransport transport(hesitant, args);
                exchange_block<Counted>(hesitant, transport, args);
            });
        });
    for (std::thread& t : threads) t.join();
    for (u32 r = 0; r < ranks.size(); ++r) {
        const TableView table = view_table(ranks[r].table.data());
        CHECK(heap.view.controls[r]->epoch == 1);
        CHECK(outputs[r] == ranks[r].output);
        for (u32 q = 0; q < kNumQueues; ++q)
            for (u32 k = 0; k < table.queues[q].num_stages; ++k) {
                const Stage& stage = table.stages[table.queues[q].first_stage + k];
                const u64 num = u64{stage.num_chunks} * stage.num_streams;
                for (u64 ticket = stage.first_item; ticket < stage.first_item + num; ++ticket) {
                    Item item{};
                    make_item(table, q, k, ticket, &item);
                    CHECK(times[r][q][ticket] == (item.num_rows != 0));
                    counts.heads += item.num_rows != 0;
                }
            }
    }
}

}  // namespace

int main(int argc, char** argv) {
    CHECK(argc == 3);
    const std::vector<RankFiles> ranks = read_ranks(argv[2]);
    if (std::strcmp(argv[1], "lost") == 0) {
        for (u32 num_lanes : {1, 2, 3, 4, 5, 8, 16, 40, 64, 256})
            for (u64 seed = 0; seed < 20; ++seed)
                for (u32 r = 0; r < ranks.size(); ++r) LostClaims(ranks, r, num_lanes, seed).run();
        for (u64 count : {counts.heads, counts.later, counts.unseen, counts.past_window,
                          counts.at_end, counts.unasked, counts.passed, counts.widest})
            std::printf("%llu ", count);
    } else {
        run_threads(ranks, 8, 1, false);
        run_threads(ranks, 5, 3, false);
        run_threads(ranks, 2, 16, true);
        std::printf("%llu\n", counts.heads);
    }
    return 0;
}
