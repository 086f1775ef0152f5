// The validator: reads the tables alone, knows nothing of how they were made.
#include "planner/core/validate.h"

#include <stdexcept>

#include "planner/core/table_walk.h"

namespace fastkern {

namespace {

Tables lower_all(const Plan& plan) {
    Tables tables;
    for (u32 r = 0; r < plan.traffic.num_ranks; ++r) tables.push_back(lower(plan, r));
    return tables;
}

std::vector<std::string> check_delivery(const Plan& plan, const Tables& tables, std::size_t most) {
    switch (view_table(tables[0].data()).header->op) {
        case kDispatch:
            return check_dispatch(plan, tables, most);
        case kCombine:
            return check_combine(plan, lower_all(plan), tables, most);
        default:
            return check_all_to_all(plan, tables, most);
    }
}

}  // namespace

std::vector<std::string> validate_tables(const Plan& plan, const Tables& tables, std::size_t most) {
    std::vector<std::string> faults = check_form(plan, tables, most);
    if (faults.empty()) faults = check_flags(plan, tables, most);
    return faults.empty() ? check_delivery(plan, tables, most) : faults;
}

std::vector<std::string> validate(const Plan& plan, std::size_t most) {
    return validate_tables(plan, lower_all(plan), most);
}

std::vector<std::string> validate_combine(const Plan& plan, CombineShape shape,
                                          const std::vector<u64>& num_tokens, std::size_t most) {
    if (!plan.moe()) throw std::invalid_argument("not the plan of a dispatch");
    if (num_tokens.size() != plan.traffic.num_ranks)
        throw std::invalid_argument("num_tokens must have an entry per rank");
    if (!shape.row_bytes || !shape.partial_row_bytes)
        throw std::invalid_argument("rows have at least one byte");
    Tables tables;
    for (u32 r = 0; r < plan.traffic.num_ranks; ++r) {
        shape.num_tokens = num_tokens[r];
        tables.push_back(lower_combine(plan, r, shape));
    }
    return validate_tables(plan, tables, most);
}

}  // namespace fastkern
