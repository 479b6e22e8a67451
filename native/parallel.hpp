// Runs independent pieces of work on several threads and reports the first failure to the caller.
#pragma once

#include <cstddef>
#include <functional>

namespace dynaquant {

inline std::size_t block_count(std::size_t values, std::size_t block_size) {
    return (values + block_size - 1) / block_size;
}

// Calls work(i) for every i in [0, count), in any order, on the calling thread and on the threads of a pool, together
// at most thread_limit. Calls from several threads share the pool; so does a call from inside work. After an exception,
// no new i is started. The first exception is rethrown when all threads have finished.
void parallel_for(std::size_t count, const std::function<void(std::size_t)>& work);

}  // namespace dynaquant
