// How blocks claim items when others are faster (kernels/body/pick.h), on the host target.
//
// Usage: claims_check lost FILE      one block; others claim between its look and each of its swaps
//        claims_check threads FILE   many blocks of each rank, which hesitate before they swap
//
// FILE: for each rank its table, its input and the output that must come, each as a length in 8
// bytes and as many bytes, filled up to a multiple of 8. Prints counts; the first check that fails
// is printed and ends the program with 1.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "kernels/entry/host_threads.h"
//
#include "kernels/body/exchange.h"
#include "kernels/entry/host_heap.h"
#include "kernels/transport/mapped.h"

using namespace fastkern;

#define CHECK(what)                                             \
    do {                                                        \
        if (!(what)) {                                          \
            std::printf("line %d: not: %s\n", __LINE__, #what); \
            std::fflush(stdout);                                \
            std::_Exit(1);                                      \
        }                                                       \
    } while (0)

namespace {

using Bytes = std::vector<u8>;

struct RankFiles {
    Bytes table, input, output;
};

Bytes read_bytes(std::ifstream& file) {
    u64 size = 0;
    file.read(reinterpret_cast<char*>(&size), sizeof size);
    Bytes bytes((size + 7) / 8 * 8);
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    bytes.resize(size);
    return bytes;
}

std::vector<RankFiles> read_ranks(const char* path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<RankFiles> ranks;
    do {
        RankFiles r;
        r.table = read_bytes(file);
        r.input = read_bytes(file);
        r.output = read_bytes(file);
        CHECK(file);
        ranks.push_back(std::move(r));
    } while (file.peek() != std::ifstream::traits_type::eof());
    CHECK(view_table(ranks[0].table.data()).header->num_ranks == ranks.size());
    return ranks;
}

// The heap of all ranks, and what one is launched with.
struct Heap {
    explicit Heap(const std::vector<RankFiles>& ranks) {
        const Header& h = *view_table(ranks[0].table.data()).header;
        const FlagLayout flags{h.num_ranks, h.servers, h.gpus_per_server, h.chunk_slots};
        const ControlLayout layout{h.num_ranks, flags.num_slots(), 8};
        num_slots = flags.num_slots();
        u64 data_bytes = 0;
        for (const RankFiles& r : ranks)
            data_bytes =
                std::max(data_bytes, data_layout(*view_table(r.table.data()).header).bytes);
        control.resize(layout.bytes() * h.num_ranks / 8);
        data.resize(data_bytes * h.num_ranks);
        view.map_control(reinterpret_cast<u8*>(control.data()), layout);
        view.map_data(data.data(), data_bytes);
    }
    KernelArgs args_of(const RankFiles& files, u32 rank, u8* output) {
        KernelArgs args{};
        args.table = files.table.data();
        args.input = files.input.data();
        args.output = output;
        args.controls = view.controls.data();
        args.flags = view.flags.data();
        args.visible_ns = view.visible_ns.data();
        args.data = view.data.data();
        args.epoch = 1;
        args.progress_ns = 60'000'000'000;
        args.num_blocks = 1;
        args.rank = rank;
        return args;
    }
    std::vector<u64> control;
    Bytes data;
    HeapView view;
    u32 num_slots;
};

// What happened to claims.
struct Counts {
    u64 heads = 0, later = 0;                     // claimed: the head, an item after it
    u64 unseen = 0, past_window = 0, at_end = 0;  // lost, for that the next item
    u64 widest = 0;                               // window
} counts;

// Before each swap of a ticket other blocks take some items of that queue.
struct Race {
    u64* tickets = nullptr;
    const Queue* queues = nullptr;
    std::vector<u64> faster;  // at each swap
    std::size_t swaps = 0;
};

class RacingTarget : public HostTarget {
  public:
    RacingTarget(HostBlock* block, u32 lane, Race* race)
        : HostTarget(block, 0, lane), race_(race) {}

    void barrier() const {}  // lanes take turns on one thread
    u64 compare_and_swap(u64* p, u64 expected, u64 desired) const {
        const std::ptrdiff_t queue = p - race_->tickets;
        if (queue >= 0 && queue < kNumQueues && race_->swaps < race_->faster.size())
            *p = std::min(*p + race_->faster[race_->swaps++], race_->queues[queue].num_items);
        return HostTarget::compare_and_swap(p, expected, desired);
    }

  private:
    Race* race_;
};

using RacingTransport = MappedTransport<RacingTarget>;
using RacingCall = Call<RacingTarget, RacingTransport>;

// One block alone on a rank whose flags come little by little: each claim against what the rules
// say of it.
class LostClaims {
  public:
    LostClaims(const std::vector<RankFiles>& ranks, u32 rank, u32 num_lanes, u64 seed)
        : heap_(ranks),
          args_(heap_.args_of(ranks[rank], rank, nullptr)),
          table_(view_table(args_.table)),
          tickets_(heap_.view.controls[rank]->tickets),
          random_(seed) {
        block_.num_lanes = num_lanes;
        race_.tickets = tickets_;
        race_.queues = table_.queues;
    }

    void run() {
        each_lane([](const RacingCall& call) {
            call.keep_views();
            Picker<RacingCall>(call).begin();
        });
        while (step()) {
        }
        for (u32 q = 0; q < kNumQueues; ++q) CHECK(tickets_[q] == table_.queues[q].num_items);
    }

  private:
    template <class Body>
    void each_lane(const Body& body, bool first_only = false) {
        for (u32 lane = 0; lane < (first_only ? 1 : block_.num_lanes); ++lane) {
            const RacingTarget target(&block_, lane, &race_);
            const RacingTransport transport(target, args_);
            body(RacingCall{target, transport, &args_});
        }
    }

    // Can an item be claimed? time: its plan time.
    bool runnable(u32 queue, u64 ticket, u64* time) {
        if (ticket >= table_.queues[queue].num_items) return false;
        const Stage* stages = table_.stages + table_.queues[queue].first_stage;
        u32 k = 0;
        while (ticket >= stages[k].first_item + u64{stages[k].num_chunks} * stages[k].num_streams)
            ++k;
        Item item{};
        make_item(table_, queue, k, ticket, &item);
        *time = item_time(table_, item);
        bool runs = false;
        each_lane([&](const RacingCall& call) { runs = can_run(call, item, nullptr); }, true);
        return runs && item.num_rows != 0;
    }

    bool step() {
        raise_some_flags();
        each_lane([](const RacingCall& call) { Picker<RacingCall>(call).look(); });
        Look& look = *reinterpret_cast<Look*>(block_.state);
        const u64 window = look.window;
        counts.widest = std::max(counts.widest, window);
        u32 best = kNumQueues;
        u64 best_time = ~u64{0};
        for (u32 q = 0; q < kNumQueues; ++q) {
            u64 time = 0;
            if (!runnable(q, tickets_[q], &time) || time >= best_time) continue;
            best = q;
            best_time = time;
        }
        race_.swaps = 0;
        race_.faster.clear();
        while (race_.faster.size() < 4) race_.faster.push_back(some_claims(window));
        u64 expected = kLookAgain, ticket = 0, next_window = 1;
        u64* const counted = expect(best, window, &expected, &ticket, &next_window);
        Choice choice{};
        each_lane([&](const RacingCall& call) { Picker<RacingCall>(call).choose(&choice); }, true);
        if (choice.decision == kLeave) return false;
        CHECK(choice.decision == expected);
        CHECK(look.window == next_window);
        if (counted) ++*counted;
        if (expected == kRunItem) {
            CHECK(choice.item.queue == best && choice.item.ticket == ticket);
            CHECK(tickets_[best] == ticket + 1);
        }
        return true;
    }

    // What must come of the choice, by the rules. Returns which count it adds to.
    u64* expect(u32 best, u64 window, u64* decision, u64* ticket, u64* next_window) {
        if (best == kNumQueues) return nullptr;
        const u64 head = tickets_[best], end = table_.queues[best].num_items;
        const u64 lanes = block_.num_lanes / kNumQueues;
        u64 held = head, time;
        *next_window = (window + 1) / 2;
        for (u64 faster : race_.faster) {
            *ticket = held;
            held = std::min(held + faster, end);
            if (held == *ticket) {
                *decision = kRunItem;
                return held == head ? &counts.heads : &counts.later;
            }
            *next_window = lanes < 4 ? 4 : lanes > 16 ? 16 : lanes;
            if (held >= end) return &counts.at_end;
            if (held >= head + window) return &counts.past_window;
            if (!runnable(best, held, &time)) return &counts.unseen;
        }
        *ticket = held;
        *decision = kRunItem;
        return &counts.later;
    }

    u64 some_claims(u64 window) {
        if (random_() % 2) return 0;
        return random_() % 4 ? 1 + random_() % 3 : window - 1 + random_() % 2;
    }

    void raise_some_flags() {
        for (u32 k = 0; k < 1 + heap_.num_slots / 16; ++k)
            heap_.view.flags[args_.rank][random_() % heap_.num_slots] = u64{2} << kValueBits;
    }

    Heap heap_;
    KernelArgs args_;
    TableView table_;
    u64* tickets_;
    std::mt19937_64 random_;
    HostBlock block_;
    Race race_;
};

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
        for (u32 num_lanes : {1, 2, 4, 8, 16, 40, 64, 256})
            for (u64 seed = 0; seed < 20; ++seed)
                for (u32 r = 0; r < ranks.size(); ++r) LostClaims(ranks, r, num_lanes, seed).run();
        std::printf("%llu %llu %llu %llu %llu %llu\n", counts.heads, counts.later, counts.unseen,
                    counts.past_window, counts.at_end, counts.widest);
    } else {
        run_threads(ranks, 8, 1, false);
        run_threads(ranks, 5, 3, false);
        run_threads(ranks, 2, 16, true);
        std::printf("%llu\n", counts.heads);
    }
    return 0;
}
