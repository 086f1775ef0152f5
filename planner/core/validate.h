// The validator of combines; those of plans and of given tables are in plan.h.
#pragma once

#include <string>
#include <vector>

#include "planner/core/plan.h"

namespace fastkern {

// Lowers the combine of every rank and checks it as validate does a dispatch. shape.num_tokens is
// not read: num_tokens [R] has each rank's.
std::vector<std::string> validate_combine(const Plan& plan, CombineShape shape,
                                          const std::vector<u64>& num_tokens,
                                          std::size_t most = 16);

}  // namespace fastkern
