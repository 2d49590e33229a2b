// A few threads that share the tasks of one job at a time.
//
// Each thread has a range of the tasks, so that it reads one stretch of memory: wherever it goes on elsewhere, the
// CPU's prefetchers begin anew. A thread that is done takes tasks from the ends of other ranges. So the calling thread
// works too and never waits for a thread that has not begun: a busy machine costs no more than its share. Threads wait
// actively for a moment after a job, as the next is near, and then sleep.
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
    explicit Pool(int num_threads) : ranges_(num_threads) {
        for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
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
        const long num = size();
        for (long i = 0; i < num; i++) ranges_[i].set(num_tasks * i / num, num_tasks * (i + 1) / num);
        announce();  // odd: open
        share(0);
        job_.fetch_add(1);  // even: closed
        while (inside_.load() != 0) pause();
    }

  private:
    // Since its last job a thread spins for so long, and then yields to whoever wants its core for so long: to wake one
    // that sleeps takes tens of microseconds, a good part of a small model's step.
    static constexpr auto SPIN = std::chrono::microseconds(50), YIELD = std::chrono::microseconds(250);

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void announce() {
        job_.fetch_add(1);
        if (asleep_.load() > 0) job_.notify_all();
    }

    // Tasks `[first, end)` that nobody has taken, in one word. On a line of cache of its own.
    class alignas(64) Range {
      public:
        void set(long first, long end) { left_.store(word(first, end), std::memory_order_relaxed); }

        // Takes the first task, or the last one.
        bool take(bool last, long& task) {
            uint64_t left = left_.load(std::memory_order_relaxed);
            for (;;) {
                const long first = long(left & 0xFFFFFFFF), end = long(left >> 32);
                if (first >= end) return false;
                task = last ? end - 1 : first;
                const uint64_t then = last ? word(first, end - 1) : word(first + 1, end);
                if (left_.compare_exchange_weak(left, then, std::memory_order_relaxed)) return true;
            }
        }

      private:
        static uint64_t word(long first, long end) { return uint64_t(end) << 32 | uint64_t(first); }

        std::atomic<uint64_t> left_{0};
    };

    void share(int self) {
        long task;
        while (ranges_[self].take(false, task)) act_(arg_, task);
        for (int i = 1; i < size(); i++)
            while (ranges_[(self + i) % size()].take(true, task)) act_(arg_, task);
    }

    void work(int self) {
        uint32_t done = 0;
        for (;;) {
            uint32_t job = await(done);
            if (ending_) return;
            inside_.fetch_add(1);
            if (job_.load() == job) share(self);  // else it is closed, and the caller does not wait for us
            inside_.fetch_sub(1);
            done = job;
        }
    }

    // The number of an open job other than `done`.
    uint32_t await(uint32_t done) {
        auto began = std::chrono::steady_clock::now();
        bool yields = false;
        for (int spins = 1;; spins++) {
            uint32_t job = job_.load();
            if (ending_ || (job % 2 == 1 && job != done)) return job;
            yields ? std::this_thread::yield() : pause();
            if (spins % 64) continue;
            const auto waited = std::chrono::steady_clock::now() - began;
            yields = waited >= SPIN;
            if (waited < YIELD) continue;
            asleep_.fetch_add(1);
            job_.wait(job);
            asleep_.fetch_sub(1);
            began = std::chrono::steady_clock::now(), yields = false;
        }
    }

    std::vector<Range> ranges_;
    std::vector<std::thread> threads_;
    std::atomic<uint32_t> job_{0};
    std::atomic<int> inside_{0}, asleep_{0};
    std::atomic<bool> ending_{false};
    void (*act_)(const void*, long) = nullptr;
    const void* arg_ = nullptr;
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
