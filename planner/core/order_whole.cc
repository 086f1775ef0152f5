// Orders of whole tiles: each server pair is sent once.
#include <algorithm>
#include <functional>

#include "planner/core/matching.h"
#include "planner/core/order.h"

namespace fastkern {

OrderProblem make_order_problem(u32 servers, u32 gpus_per_server, const Vector<u64>& matrix,
                                u64 row_bytes, const Topology& topology, u32 chunk_slots) {
    OrderProblem p;
    p.servers = servers;
    p.matrix = matrix.data();
    u64 total = 0;
    for (const u64 w : matrix) total += w;
    while ((total >> p.shift) > (u64{1} << 48)) ++p.shift;
    if (p.shift) p.least_ticks = chunk_slots;
    // alpha as tile rows: a tile of w rows takes w / M rows of time on its rails.
    using wide = unsigned __int128;
    const wide row_ps_per_1024 =
        std::max<wide>(1, static_cast<wide>(row_bytes) * topology.scale_out_cost);
    const wide alpha =
        static_cast<wide>(topology.alpha_ps) * 1024 * gpus_per_server / row_ps_per_1024;
    p.alpha_ticks = static_cast<u64>(std::min<wide>(alpha, u64{1} << 36)) >> p.shift;
    return p;
}

u64 replay(const OrderProblem& problem, Vector<Put>* puts) {
    Vector<u64> sender_free(problem.servers, 0), receiver_free(problem.servers, 0);
    u64 completion = 0;
    struct Start {
        u64 ticks;
        std::size_t put;
        bool operator<(const Start& o) const {
            return ticks != o.ticks ? ticks < o.ticks : put < o.put;
        }
    };
    Vector<Start> starts;
    starts.reserve(puts->size());
    bool sorted = true;
    for (Put& put : *puts) {
        put.ticks_begin = std::max(sender_free[put.sender], receiver_free[put.receiver]);
        put.ticks_end = put.ticks_begin + problem.ticks(put.row_end - put.row_begin);
        sender_free[put.sender] = receiver_free[put.receiver] = put.ticks_end;
        completion = std::max(completion, put.ticks_end);
        sorted &= starts.empty() || starts.back().ticks <= put.ticks_begin;
        starts.push_back({put.ticks_begin, starts.size()});
    }
    if (sorted) return completion;
    std::sort(starts.begin(), starts.end());
    Vector<Put> in_order;
    in_order.reserve(puts->size());
    for (const Start& start : starts) in_order.push_back((*puts)[start.put]);
    *puts = std::move(in_order);
    return completion;
}

Vector<Put> order_by_list(const OrderProblem& problem) {
    const u32 n = problem.servers;
    Vector<u64> row_left(n, 0), column_left(n, 0), left(problem.matrix, problem.matrix + n * n);
    Vector<u32> sender_todo(n, 0);
    std::size_t todo = 0;
    for (u32 a = 0; a < n; ++a)
        for (u32 b = 0; b < n; ++b)
            if (problem.at(a, b)) {
                row_left[a] += problem.at(a, b);
                column_left[b] += problem.at(a, b);
                ++sender_todo[a];
                ++todo;
            }
    Vector<Put> puts;
    puts.reserve(todo);
    Vector<u32> senders, receivers;  // idle, ascending
    senders.reserve(n);
    receivers.reserve(n);
    for (u32 s = 0; s < n; ++s) {
        senders.push_back(s);
        receivers.push_back(s);
    }
    struct Busy {
        u64 until;
        u32 sender, receiver;
        bool operator>(const Busy& o) const {
            return until != o.until     ? until > o.until
                   : sender != o.sender ? sender > o.sender
                                        : receiver > o.receiver;
        }
    };
    Vector<Busy> busy;  // a heap, the first to end on top
    busy.reserve(n);
    u64 now = 0;
    while (todo) {
        for (;;) {  // start pairs while an idle sender has rows for an idle receiver
            u64 best_key = 0, best_rows = 0;
            std::size_t best_a = 0, best_b = 0;
            for (std::size_t x = 0; x < senders.size(); ++x) {
                const u64* row = &left[static_cast<std::size_t>(senders[x]) * n];
                for (std::size_t y = 0; y < receivers.size(); ++y) {
                    const u64 rows = row[receivers[y]];
                    if (!rows) continue;
                    const u64 key = std::max(row_left[senders[x]], column_left[receivers[y]]);
                    if (key > best_key || (key == best_key && rows > best_rows)) {
                        best_key = key;
                        best_rows = rows;
                        best_a = x;
                        best_b = y;
                    }
                }
            }
            if (!best_rows) break;
            const u32 a = senders[best_a], b = receivers[best_b];
            const u64 end = now + problem.ticks(best_rows);
            puts.push_back({a, b, 0, best_rows, now, end});
            busy.push_back({end, a, b});
            std::push_heap(busy.begin(), busy.end(), std::greater<Busy>());
            left[static_cast<std::size_t>(a) * n + b] = 0;
            row_left[a] -= best_rows;
            column_left[b] -= best_rows;
            --todo;
            --sender_todo[a];
            senders.erase(senders.begin() + static_cast<std::ptrdiff_t>(best_a));
            receivers.erase(receivers.begin() + static_cast<std::ptrdiff_t>(best_b));
        }
        if (busy.empty()) break;
        now = busy.front().until;
        while (!busy.empty() && busy.front().until == now) {
            std::pop_heap(busy.begin(), busy.end(), std::greater<Busy>());
            const Busy done = busy.back();
            busy.pop_back();
            if (sender_todo[done.sender])
                senders.insert(std::lower_bound(senders.begin(), senders.end(), done.sender),
                               done.sender);
            if (column_left[done.receiver])
                receivers.insert(
                    std::lower_bound(receivers.begin(), receivers.end(), done.receiver),
                    done.receiver);
        }
    }
    return puts;
}

Vector<Put> order_by_assignment(const OrderProblem& problem) {
    const u32 n = problem.servers;
    const std::size_t size = static_cast<std::size_t>(n) * n;
    Vector<u64> left(problem.matrix, problem.matrix + size), row_left(n, 0), column_left(n, 0);
    u64 total = 0;
    std::size_t todo = 0;
    for (u32 a = 0; a < n; ++a)
        for (u32 b = 0; b < n; ++b) {
            const u64 w = left[static_cast<std::size_t>(a) * n + b];
            row_left[a] += w;
            column_left[b] += w;
            total += w;
            todo += w != 0;
        }
    Vector<Put> puts;
    puts.reserve(todo);
    MatchingScratch scratch;
    Vector<i64> value(size);
    Vector<u32> column_of;
    while (total) {
        u64 heaviest = 0;
        for (u32 s = 0; s < n; ++s) heaviest = std::max({heaviest, row_left[s], column_left[s]});
        for (u32 a = 0; a < n; ++a)
            for (u32 b = 0; b < n; ++b) {
                const u64 w = left[static_cast<std::size_t>(a) * n + b];
                i64 v = 0;
                if (w) {
                    const u64 scaled = 1 + mul_div(w, u64{1} << 20, heaviest);
                    v = static_cast<i64>(scaled * scaled);
                    // Rows and columns without slack must not pause: they end last.
                    const u64 urgent = std::max(row_left[a], column_left[b]);
                    if (urgent == heaviest) v += i64{1} << 42;
                }
                value[static_cast<std::size_t>(a) * n + b] = v;
            }
        max_assignment(n, value, &scratch, &column_of);
        for (u32 a = 0; a < n; ++a) {
            const u32 b = column_of[a];
            u64& w = left[static_cast<std::size_t>(a) * n + b];
            if (!w) continue;
            puts.push_back({a, b, 0, w, 0, 0});
            row_left[a] -= w;
            column_left[b] -= w;
            total -= w;
            w = 0;
        }
    }
    return puts;
}

}  // namespace fastkern
