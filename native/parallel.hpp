// Runs independent pieces of work on several threads and hands the first failure back to the caller.
#pragma once

#include <cstddef>
#include <functional>

namespace dynaquant {

inline std::size_t block_count(std::size_t values, std::size_t block_size) {
    return (values + block_size - 1) / block_size;
}

// Calls work(i) for every i in [0, count), in any order, on the calling thread and on threads that are kept from call
// to call, together as many as thread_limit says. Calls from several threads at a time share the kept ones; so does a
// call from inside work. After an exception no new i is begun; the first one is rethrown once all threads have ended.
void parallel_for(std::size_t count, const std::function<void(std::size_t)>& work);

}  // namespace dynaquant
