import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.MessageProperties;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;

/**
 * Messages to a durable queue of RabbitMQ, and from it. Prints how many seconds they took. WARMUP messages go through
 * another queue before, so that Java has compiled what is measured.
 *
 * <pre>produce PORT QUEUE COUNT BYTES WINDOW WARMUP   persistent messages; at most WINDOW are unconfirmed, 0: without confirms
 * consume PORT QUEUE COUNT BYTES WINDOW WARMUP   from the first on; at most WINDOW are unacknowledged, 0: without acks
 * delete PORT QUEUE</pre>
 */
public class RabbitMq {
    public static void main(String[] given) throws Exception {
        ConnectionFactory factory = new ConnectionFactory();
        factory.setHost("127.0.0.1");
        factory.setPort(Integer.parseInt(given[1]));
        try (Connection connection = factory.newConnection(); Channel channel = connection.createChannel()) {
            if (given[0].equals("delete")) {
                channel.queueDelete(given[2]);
                return;
            }
            int count = Integer.parseInt(given[3]);
            int bytes = Integer.parseInt(given[4]);
            int window = Integer.parseInt(given[5]);
            boolean isProduced = given[0].equals("produce");
            warmUp(connection, Integer.parseInt(given[6]), bytes, window, isProduced);
            channel.queueDeclare(given[2], true, false, false, null);
            double seconds = isProduced
                    ? produce(channel, given[2], count, bytes, window)
                    : consume(channel, given[2], count, window);
            System.out.println(seconds);
        }
    }

    static void warmUp(Connection connection, int count, int bytes, int window, boolean isProduced) throws Exception {
        if (count == 0) {
            return;
        }
        try (Channel channel = connection.createChannel()) {
            String queue = channel.queueDeclare("", true, true, true, null).getQueue();
            produce(channel, queue, count, bytes, isProduced ? window : 0);
            if (!isProduced) {
                consume(channel, queue, count, window);
            }
            channel.queueDelete(queue);
        }
    }

    static double produce(Channel channel, String queue, int count, int bytes, int window) throws Exception {
        byte[] value = new byte[bytes];
        new Random(1).nextBytes(value);
        Semaphore room = new Semaphore(window);
        long[] confirmed = {0};
        if (window > 0) {
            channel.confirmSelect();
            channel.addConfirmListener((tag, multiple) -> {
                room.release(multiple ? (int) (tag - confirmed[0]) : 1);
                confirmed[0] = multiple ? tag : confirmed[0] + 1;
            }, (tag, multiple) -> {
                System.err.println("the broker refused a message");
                System.exit(1);
            });
        }
        long begun = System.nanoTime();
        for (int sent = 0; sent < count; sent++) {
            if (window > 0) {
                room.acquire();
            }
            channel.basicPublish("", queue, MessageProperties.PERSISTENT_BASIC, value);
        }
        if (window > 0) {
            channel.waitForConfirmsOrDie();
        }
        int stored; // the queue answers this before it takes in all that the channel has sent
        while ((stored = channel.queueDeclarePassive(queue).getMessageCount()) < count) {
            if (System.nanoTime() - begun > 600e9) {
                throw new IllegalStateException("the queue has " + stored + " of " + count + " messages");
            }
        }
        double seconds = (System.nanoTime() - begun) / 1e9;
        if (stored > count) {
            throw new IllegalStateException("the queue has " + stored + " messages, not " + count);
        }
        return seconds;
    }

    static double consume(Channel channel, String queue, int count, int window) throws Exception {
        CountDownLatch done = new CountDownLatch(1);
        long[] begun = {0};
        int[] seen = {0};
        channel.basicQos(window);
        channel.basicConsume(queue, window == 0, (tag, message) -> {
            if (seen[0]++ == 0) {
                begun[0] = System.nanoTime();
            }
            if (window > 0 && (seen[0] % Math.max(1, window / 2) == 0 || seen[0] == count)) {
                channel.basicAck(message.getEnvelope().getDeliveryTag(), true);
            }
            if (seen[0] == count) {
                done.countDown();
            }
        }, tag -> {});
        done.await();
        return (System.nanoTime() - begun[0]) / 1e9;
    }
}
