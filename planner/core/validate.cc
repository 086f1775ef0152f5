// The validator: reads the tables alone, knows nothing of how they were made.
#include "planner/core/table_walk.h"

namespace fastkern {

std::vector<std::string> validate_tables(const Plan& plan,
                                         const std::vector<std::vector<u8>>& tables,
                                         std::size_t most) {
    std::vector<std::string> faults = check_flags(plan, tables, most);
    return faults.empty() ? check_rows(plan, tables, most) : faults;
}

std::vector<std::string> validate(const Plan& plan, std::size_t most) {
    std::vector<std::vector<u8>> tables;
    for (u32 r = 0; r < plan.traffic.num_ranks; ++r) tables.push_back(lower(plan, r));
    return validate_tables(plan, tables, most);
}

}  // namespace fastkern
