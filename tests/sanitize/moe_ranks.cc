#include "tests/sanitize/moe_ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "kernels/entry/host_rank.h"
#include "tests/sanitize/moe_handle.h"

namespace fastkern {

namespace {

constexpr u64 kDeadlineNs = 120'000'000'000ull;
constexpr u64 kGuardBytes = 256;
constexpr u8 kGuard = 0xC5;

Plan plan_of(const MoeProgram& program, const Routing& r, u64 row_bytes) {
    Options options = program.options;
    options.chunk_bytes *= row_bytes;  // given in rows
    return make_moe_plan(r.to_server.data(), r.to_rank.data(), r.topology, row_bytes,
                         program.policy, options);
}

// More partial rows than any proxy can give out.
u64 most_partials(const Plan& plan) {
    return plan.staging_rows().second * (plan.topology.gpus_per_server - 1);
}

class RankRunner {
  public:
    RankRunner(const MoeProgram& program, const LaunchOptions& options, u32 rank, HostRank* host)
        : program_(program), options_(options), rank_(rank), host_(*host) {
        routes_.resize(program.routings.size());
    }

    std::string run() {
        for (const MoeStep& step : program_.steps) {
            ++epoch_;
            if (step.delay_us[rank_])
                std::this_thread::sleep_for(std::chrono::microseconds(step.delay_us[rank_]));
            const std::string fault = step.dispatch() ? dispatch(step) : combine(step);
            if (!fault.empty())
                return "step " + std::to_string(epoch_) +
                       (step.dispatch() ? ", dispatch: " : ", combine: ") + fault;
        }
        return {};
    }

  private:
    // A routing's plan and handle here.
    struct Route {
        Plan plan;
        std::vector<u64> handle;
        u8* bytes() { return reinterpret_cast<u8*>(handle.data()); }
    };

    std::string dispatch(const MoeStep& step) {
        const Routing& r = program_.routings[step.routing];
        Route& route = routes_[step.routing];
        const Payload& p = step.payload;
        const std::string fault = step.record ? make_handle(step, &route) : exchange({0});
        if (!fault.empty()) return fault;
        const Vector<u8> table = lower(plan_of(program_, r, p.row_bytes), rank_);

        const u64 tokens = r.num_tokens(rank_), rows = r.rows[rank_].size();
        const u64 weights = r.layout == kExpertLayout ? rows : rows * r.topk;
        Received got;
        std::vector<Bytes> inputs;
        MoeArgs moe{};
        moe.handle = route.bytes();
        for (u64 part = 0; part < p.part_bytes.size(); ++part) {
            inputs.push_back(p.input(part, rank_, tokens, p.part_bytes[part]));
            got.parts.emplace_back(rows * p.part_bytes[part], kUnwritten);
        }
        for (u64 part = 0; part < p.part_bytes.size(); ++part)
            moe.parts[moe.num_parts++] = {inputs[part].data(), got.parts[part].data(),
                                          p.part_bytes[part], p.offsets[part]};
        const Bytes weights_input =
            p.input(p.part_bytes.size(), rank_, tokens, u64{p.weight_bytes} * r.topk);
        got.weights.assign(weights * p.weight_bytes, kUnwritten);
        if (r.layout == kRankLayout) got.index.assign(rows * r.topk, 77);
        moe.weights_input = weights_input.data();
        moe.weights_output = got.weights.data();
        moe.index_output = r.layout == kRankLayout ? got.index.data() : nullptr;
        moe.weights_offset = p.weights_offset;
        moe.header_offset = p.header_offset;
        moe.weight_bytes = p.weight_bytes;
        moe.record = step.record;
        if (!launch(table, moe)) return "aborted";
        return check_received(r, p, rank_, got);
    }

    // Route, counts of all ranks, plan; all as every rank does it for itself.
    std::string make_handle(const MoeStep& step, Route* route) {
        const Routing& r = program_.routings[step.routing];
        std::vector<int> narrow(r.idx[rank_].begin(), r.idx[rank_].end());
        const bool wide = step.payload.salt % 2;
        HostRoute found({wide ? reinterpret_cast<const u8*>(r.idx[rank_].data())
                              : reinterpret_cast<const u8*>(narrow.data()),
                         wide ? 8u : 4u, r.num_tokens(rank_), r.topk, r.owner, r.local_index,
                         r.topology.servers, r.topology.gpus_per_server, rank_,
                         program_.num_units});
        if (found.bad() != ~u64{0}) return "route found a bad index";
        Counts counts = known_counts(r);
        if (found.totals() != counts[rank_]) return "route counted wrong";
        const std::string fault = exchange(found.totals(), &counts);
        if (!fault.empty()) return fault;
        route->plan = plan_of(program_, r, step.payload.row_bytes);
        route->handle = empty_handle(r, route->plan, counts, rank_);
        found.fill(route->bytes(), first_rows(r, counts, rank_), r.layout);
        return {};
    }

    std::string combine(const MoeStep& step) {
        const Routing& r = program_.routings[step.routing];
        Route& route = routes_[step.routing];
        const Sums& s = step.sums;
        u64 num_partials = most_partials(route.plan);
        if (program_.exchanged) {
            Counts all(r.num_ranks(), {0});
            const u64 own = view_handle(route.bytes()).header->num_partials;
            if (own > num_partials) return "more partial rows than can be";
            const std::string fault = exchange({own}, &all);
            if (!fault.empty()) return fault;
            num_partials = 0;
            for (const std::vector<u64>& one : all) num_partials = std::max(num_partials, one[0]);
        }
        const u64 tokens = r.num_tokens(rank_);
        const Vector<u8> table = lower_combine(
            route.plan, rank_, {s.row_bytes(), s.partial_row_bytes(), num_partials, tokens});
        Bytes result(tokens * s.width * value_bytes(s.value_kind), kUnwritten);
        MoeArgs moe{};
        moe.handle = route.bytes();
        moe.expert_out = s.expert_out[rank_].data();
        moe.row_weights = s.weighted ? s.weights[rank_].data() : nullptr;
        moe.bias = s.bias_rows ? s.bias[rank_].data() : nullptr;
        moe.result = result.data();
        moe.width = s.width;
        moe.bias_stride = s.bias_stride();
        moe.value_kind = s.value_kind;
        moe.wire_kind = s.wire_kind;
        moe.bias_kind = s.bias_kind;
        if (!launch(table, moe)) return "aborted";
        return check_result(r, s, rank_, result);
    }

    // All ranks' words, as long as these, where ranks exchange them.
    std::string exchange(const std::vector<u64>& words, Counts* all = nullptr) {
        if (!program_.exchanged) return {};
        const u64 bytes = words.size() * 8;
        host_.post_record(epoch_, reinterpret_cast<const u8*>(words.data()), bytes);
        if (host_.await_records(epoch_, kDeadlineNs) != Outcome::kDone)
            return "records did not come";
        for (u32 k = 0; all && k < all->size(); ++k) {
            std::vector<u64> read(words.size());
            std::memcpy(read.data(), host_.record(epoch_, k), bytes);
            (*all)[k] = read;
        }
        return {};
    }

    bool launch(const Vector<u8>& table, const MoeArgs& moe) {
        return host_.launch(table.data(), nullptr, nullptr, &moe, epoch_, kDeadlineNs, options_);
    }

    const MoeProgram& program_;
    const LaunchOptions& options_;
    const u32 rank_;
    HostRank& host_;
    std::vector<Route> routes_;
    u64 epoch_ = 0;
};

// The most bytes of staging that any step needs; the same on every rank.
u64 heap_bytes(const MoeProgram& program) {
    std::vector<Plan> plans(program.routings.size());
    u64 most = 0;
    for (const MoeStep& step : program.steps) {
        const Routing& r = program.routings[step.routing];
        Vector<u8> table;
        if (step.dispatch()) {
            const Plan plan = plan_of(program, r, step.payload.row_bytes);
            if (step.record) plans[step.routing] = plan;
            table = lower(plan, 0);
        } else {
            const Plan& plan = plans[step.routing];
            table = lower_combine(
                plan, 0,
                {step.sums.row_bytes(), step.sums.partial_row_bytes(), most_partials(plan), 0});
        }
        most = std::max(most, data_layout(*view_table(table.data()).header).bytes);
    }
    return most;
}

}  // namespace

MoeProgram make_program(Random& random, const Topology& topology) {
    MoeProgram p;
    p.policy = static_cast<PolicyChoice>(random() % 5);
    p.options.chunk_bytes = 1 + random() % 8;  // rows
    p.options.credit_lead = static_cast<u32>(random() % 3);
    p.num_units = 1 + static_cast<u32>(random() % 4);
    p.exchanged = random() % 2;
    const auto add = [&](u32 routing, bool record, bool dispatch) {
        MoeStep step{routing, record, {}, {}, {}};
        if (dispatch)
            step.payload = make_payload(random, p.routings[routing].topk);
        else
            step.sums = make_sums(random, p.routings[routing]);
        for (u32 r = 0; r < topology.num_ranks(); ++r)
            step.delay_us.push_back(random() % 5 == 0 ? 2000 : 0);
        p.steps.push_back(std::move(step));
    };
    for (u32 k = 0; k < 2; ++k) {
        p.routings.push_back(make_routing(random, topology));
        add(k, true, true);
        for (u64 more = 1 + random() % 2; more > 0; --more)  // of this routing, or of the last
            add(static_cast<u32>(random() % (k + 1)), false, random() % 3 == 0);
        add(k, false, false);
    }
    return p;
}

std::string run_program(const MoeProgram& program, const LaunchOptions& options) {
    const Topology& topology = program.routings[0].topology;
    const u32 num_ranks = topology.num_ranks();
    u64 record_words = 1;
    for (const Routing& r : program.routings)
        record_words = std::max(record_words, u64{r.num_experts} + topology.servers + num_ranks);
    const FlagLayout flags{num_ranks, topology.servers, topology.gpus_per_server,
                           program.options.chunk_slots};
    const ControlLayout layout{num_ranks, flags.num_slots(), record_words * 8};
    const u64 data_bytes = heap_bytes(program), stride = data_bytes + kGuardBytes;
    std::vector<u64> control(layout.bytes() * num_ranks / 8, 0);
    std::vector<u8> data(stride * num_ranks + kGuardBytes, kGuard);
    std::vector<std::string> errors(num_ranks);
    std::vector<std::thread> threads;
    for (u32 rank = 0; rank < num_ranks; ++rank)
        threads.emplace_back([&, rank] {
            HostRank host(rank, layout, reinterpret_cast<u8*>(control.data()));
            host.map_data(data.data() + kGuardBytes, stride);
            errors[rank] = RankRunner(program, options, rank, &host).run();
            if (!errors[rank].empty()) host.abort_all(1);
        });
    for (std::thread& t : threads) t.join();
    for (const char* worse : {"wrong", "found", "more", ""})  // others are aborted by the first
        for (const std::string& error : errors)
            if (!error.empty() && error.find(worse) != std::string::npos) return error;
    for (u32 rank = 0; rank <= num_ranks; ++rank)
        for (u64 k = 0; k < kGuardBytes; ++k)
            if (data[rank * stride + k] != kGuard)
                return "bytes around the heap of a rank were overwritten";
    return {};
}

}  // namespace fastkern
