// Runs independent pieces of work on several threads and reports the first failure to the caller.
//
// The caller of a job works on it, too, and waits for other threads only when no work is left to start. So a job ends
// even if all other threads are busy with other jobs, or if there are none.
#include "parallel.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "threads.hpp"

namespace dynaquant {
namespace {

// One call of parallel_for, on the caller's stack.
class Job {
public:
    Job(std::size_t count, const std::function<void(std::size_t)>& work, const Processors& processors)
        : count_(count), work_(work), processors_(processors) {}

    void do_work() noexcept {
        try {
            for (std::size_t i; (i = next_.fetch_add(1)) < count_;) work_(i);
        } catch (...) {
            const std::lock_guard lock(failure_mutex_);
            if (!failure_) failure_ = std::current_exception();
            next_.store(count_);
        }
    }

    void rethrow_failure() const {
        if (failure_) std::rethrow_exception(failure_);
    }

    const Processors& processors() const { return processors_; }

    // Only the pool uses these, under its mutex.
    std::size_t places = 0;   // how many more threads may join
    std::size_t helpers = 0;  // how many threads have joined and are working
    std::condition_variable left;

private:
    const std::size_t count_;
    const std::function<void(std::size_t)>& work_;
    const Processors processors_;
    std::atomic<std::size_t> next_{0};
    std::mutex failure_mutex_;
    std::exception_ptr failure_;
};

// Threads that wait for jobs to join.
class Pool {
public:
    // Works on the job with at most `helpers` threads beside the calling one. Returns when the job is done.
    void run(Job& job, std::size_t helpers) {
        job.places = helpers;
        std::unique_lock lock(mutex_);
        start_threads(helpers);
        jobs_.push_back(&job);
        lock.unlock();
        for (std::size_t h = 0; h < helpers; ++h) wake_.notify_one();
        job.do_work();
        lock.lock();
        jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
        job.left.wait(lock, [&] { return job.helpers == 0; });
    }

private:
    // Call it under the mutex.
    void start_threads(std::size_t wanted) {
        try {
            for (; threads_ < wanted; ++threads_) std::thread([this] { join_jobs(); }).detach();
        } catch (const std::system_error&) {
            // The system allows no more threads: the existing ones do the work.
        }
    }

    [[noreturn]] void join_jobs() {
        auto processors = Processors::of_this_thread();
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return !jobs_.empty(); });
            Job& job = *jobs_.front();
            ++job.helpers;
            if (--job.places == 0) jobs_.erase(jobs_.begin());
            lock.unlock();
            // A helper may only use the processors that the caller may use.
            if (!(processors == job.processors())) (processors = job.processors()).hold_this_thread();
            job.do_work();
            lock.lock();
            // Notify under the mutex, because the caller destroys the job as soon as it has the mutex.
            if (--job.helpers == 0) job.left.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<Job*> jobs_;  // jobs that more threads may join, the oldest first
    std::size_t threads_ = 0;
};

// Never deleted: its threads run until the process ends.
Pool* const pool = new Pool;

#ifndef _WIN32
// A forked child has none of the threads, and one of them may have held the mutex. So the child makes a new pool in the
// memory of the old one. It must not touch the old pool, not even to destroy it.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { std::construct_at(pool); });
#endif

}  // namespace

void parallel_for(std::size_t count, const std::function<void(std::size_t)>& work) {
    if (count <= 1) {
        if (count == 1) work(0);
        return;
    }
    const auto processors = Processors::of_this_thread();
    const std::size_t threads = std::min(count, thread_limit(processors));
    Job job(count, work, processors);
    if (threads > 1)
        pool->run(job, threads - 1);
    else
        job.do_work();
    job.rethrow_failure();
}

}  // namespace dynaquant
