// A few threads that share the tasks of one job at a time.
//
// The calling thread works too and never waits for a thread that has not begun: a busy machine costs no more than
// its share. Threads spin for a moment after a job, as the next is near, and then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace holdfast {

class Pool {
  public:
    explicit Pool(int num_threads) {
        for (int i = 1; i < num_threads; i++) threads_.emplace_back([this] { work(); });
    }
    ~Pool() {
        ending_ = true;
        announce();
        for (auto& thread : threads_) thread.join();
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return int(threads_.size()) + 1; }

    // Calls `act(task)` for each task, in any order, and returns when all are done.
    template <class Act>
    void each(long num_tasks, const Act& act) {
        if (threads_.empty() || num_tasks < 2) {
            for (long task = 0; task < num_tasks; task++) act(task);
            return;
        }
        act_ = [](const void* act, long task) { (*static_cast<const Act*>(act))(task); };
        arg_ = &act;
        num_tasks_ = num_tasks;
        next_.store(0, std::memory_order_relaxed);
        announce();  // odd: open
        share();
        job_.fetch_add(1);  // even: closed
        while (inside_.load() != 0) pause();
    }

  private:
    static constexpr auto SPIN = std::chrono::microseconds(50);

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void announce() {
        job_.fetch_add(1);
        if (asleep_.load() > 0) job_.notify_all();
    }

    void share() {
        for (long task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) act_(arg_, task);
    }

    void work() {
        uint32_t done = 0;
        for (;;) {
            uint32_t job = await(done);
            if (ending_) return;
            inside_.fetch_add(1);
            if (job_.load() == job) share();  // else it is closed, and the caller does not wait for us
            inside_.fetch_sub(1);
            done = job;
        }
    }

    // The number of an open job other than `done`.
    uint32_t await(uint32_t done) {
        auto until = std::chrono::steady_clock::now() + SPIN;
        for (int spins = 1;; spins++) {
            uint32_t job = job_.load();
            if (ending_ || (job % 2 == 1 && job != done)) return job;
            pause();
            if (spins % 64 || std::chrono::steady_clock::now() < until) continue;
            asleep_.fetch_add(1);
            job_.wait(job);
            asleep_.fetch_sub(1);
            until = std::chrono::steady_clock::now() + SPIN;
        }
    }

    std::vector<std::thread> threads_;
    std::atomic<uint32_t> job_{0};
    std::atomic<int> inside_{0}, asleep_{0};
    std::atomic<long> next_{0};
    std::atomic<bool> ending_{false};
    void (*act_)(const void*, long) = nullptr;
    const void* arg_ = nullptr;
    long num_tasks_ = 0;
};

// Memory of one thread, for the time of a task: one piece for each `Tag`.
template <class Tag, class T>
inline T* scratch(size_t count) {
    thread_local std::unique_ptr<char[]> memory;
    thread_local size_t size = 0;
    size_t wanted = count * sizeof(T) + 64;
    if (size < wanted) {
        memory.reset(new char[wanted]);
        size = wanted;
    }
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
}

}  // namespace holdfast
