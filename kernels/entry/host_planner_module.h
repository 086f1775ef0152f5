// Python's view of the planner as a host node of a graph; see host_module.cc.
#pragma once

#include <nanobind/nanobind.h>

namespace fastkern {

void bind_planner(nanobind::module_& m);

}  // namespace fastkern
