// Runs independent pieces of work on several threads and hands the first failure back to the caller.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace dynaquant {

inline std::size_t block_count(std::size_t values, std::size_t block_size) {
    return (values + block_size - 1) / block_size;
}

// Calls work(i) for every i in [0, count), in any order. The first exception is rethrown once all threads have ended.
template <class Work>
void parallel_for(std::size_t count, Work&& work) {
    const std::size_t threads = std::min<std::size_t>(count, std::max(1u, std::thread::hardware_concurrency()));
    if (threads <= 1) {
        for (std::size_t i = 0; i < count; ++i) work(i);
        return;
    }
    std::atomic<std::size_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto loop = [&] {
        try {
            for (std::size_t i; (i = next.fetch_add(1)) < count;) work(i);
        } catch (...) {
            const std::lock_guard lock(failure_mutex);
            if (!failure) failure = std::current_exception();
            next.store(count);
        }
    };
    {
        std::vector<std::jthread> pool;
        try {
            for (std::size_t t = 1; t < threads; ++t) pool.emplace_back(loop);
        } catch (const std::system_error&) {
            // No more threads to be had: those that are there do the work.
        }
        loop();
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace dynaquant
