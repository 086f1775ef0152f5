// Split tiles: a decomposition into one-to-one stages whose widths sum to exactly L.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "planner/core/matching.h"
#include "planner/core/order.h"

namespace fastkern {

// Rows and columns lighter than L keep their missing rows as slack instead of filling the matrix
// first, which would force about N^2 stages. A pair can host min(real + slack, ...) units of a
// stage: E[i][j] = S[i][j] + min(slack_i, slack_j). Since real and slack sum to L in every row and
// column, E > 0 always holds a perfect matching. Each stage takes the largest width that one exists
// for, and among the matchings of that width the one that moves most real rows.
Vector<Put> order_split(const OrderProblem& problem, u32 most_parts) {
    const u32 n = problem.servers;
    const std::size_t size = static_cast<std::size_t>(n) * n;
    Vector<u64> left(problem.matrix, problem.matrix + size), row_slack(n, 0), column_slack(n, 0);
    u64 width_left = 0;
    for (u32 a = 0; a < n; ++a)
        for (u32 b = 0; b < n; ++b) {
            row_slack[a] += problem.at(a, b);
            column_slack[b] += problem.at(a, b);
        }
    for (u32 s = 0; s < n; ++s) width_left = std::max({width_left, row_slack[s], column_slack[s]});
    for (u32 s = 0; s < n; ++s) {
        row_slack[s] = width_left - row_slack[s];
        column_slack[s] = width_left - column_slack[s];
    }
    Vector<Put> puts;
    Vector<u64> open(size), widths;
    Vector<i64> value(size);
    MatchingScratch scratch;
    Vector<u32> column_of, parts(size, 0);
    Vector<std::size_t> last_of_sender(n, 0), last_of_receiver(n, 0);  // index + 1 into puts
    u64 now = 0;
    while (width_left) {
        widths.clear();
        for (u32 a = 0; a < n; ++a)
            for (u32 b = 0; b < n; ++b) {
                const std::size_t k = static_cast<std::size_t>(a) * n + b;
                open[k] = left[k] + std::min(row_slack[a], column_slack[b]);
                if (open[k]) widths.push_back(std::min(open[k], width_left));
            }
        std::sort(widths.begin(), widths.end());
        widths.erase(std::unique(widths.begin(), widths.end()), widths.end());
        std::size_t low = 0, high = widths.size();  // widths[low] is feasible, widths[high] is not
        while (high - low > 1) {
            const std::size_t mid = (low + high) / 2;
            (has_perfect_matching(n, open, widths[mid], &scratch) ? low : high) = mid;
        }
        const u64 width = widths[low];
        for (std::size_t k = 0; k < size; ++k)
            value[k] =
                open[k] < width
                    ? -(i64{1} << 50)
                    : static_cast<i64>(mul_div(std::min(left[k], width), u64{1} << 30, width));
        max_assignment(n, value, &scratch, &column_of);
        for (u32 a = 0; a < n; ++a) {
            const u32 b = column_of[a];
            const std::size_t k = static_cast<std::size_t>(a) * n + b;
            const u64 real = std::min(left[k], width);
            row_slack[a] -= width - real;
            column_slack[b] -= width - real;
            if (!real) continue;
            const u64 row = problem.matrix[k] - left[k];
            left[k] -= real;
            const std::size_t last = last_of_sender[a];
            if (last && last == last_of_receiver[b]) {  // the same pair again: one longer put
                puts[last - 1].row_end += real;
                continue;
            }
            if (++parts[k] > most_parts)
                throw std::invalid_argument("policy split: tile " + std::to_string(a) + " -> " +
                                            std::to_string(b) + " would be cut into more than " +
                                            std::to_string(most_parts) +
                                            " puts; raise chunk_slots or use policy whole");
            puts.push_back({a, b, row, row + real, now, 0});
            last_of_sender[a] = last_of_receiver[b] = puts.size();
        }
        now += width >> problem.shift;
        width_left -= width;
    }
    return puts;
}

}  // namespace fastkern
